#include <headroom/diagnose.h>

#include <algorithm>
#include <set>

#include "diagnose/rules.h"
#include "record/report.h"
#include "record/text.h"

namespace headroom {
namespace internal {
namespace {

constexpr size_t kFewSteps = 10;  // too few to call a run healthy

std::string healthy_summary(const RunFacts& run) {
  const auto skipped = static_cast<size_t>(run.history.skipped);
  const std::string steps = std::to_string(run.steps.size());
  if (run.steps.size() < kFewSteps) {
    return "This run is too short to judge: it has " + steps +
           (run.steps.size() == 1 ? " step." : " steps.");
  }
  if (run.applied == 0) {
    return "This run cannot be judged yet: none of its " + steps + " steps was applied.";
  }
  const auto settled = run.steps.begin() + static_cast<std::ptrdiff_t>(run.settled);
  const auto late = std::count_if(settled, run.steps.end(),
                                  [](const HistoryStep& step) { return !step.applied; });
  if (20 * late >= static_cast<std::ptrdiff_t>(run.steps.size())) {
    return "No rule explains why " + std::to_string(skipped) + " of " + steps +
           " steps were skipped; look at their culprits in the report.";
  }
  std::string text = "Nothing is wrong: " + (skipped == 0 ? "none" : std::to_string(skipped)) +
                     " of " + steps + (skipped <= 1 ? " steps was skipped" : " steps were skipped");
  if (run.narrow() && run.scales()) {
    text += ", the scale ended at " + scale_text(run.last_scale());
    if (run.room.has_value() && run.failed_at_bound == 0) {
      text += " with room for " + doublings_text(*run.room);
    }
  }
  return text + ".";
}

}  // namespace

Diagnosis diagnose_run(const History& history) {
  const RunFacts run(history);
  Diagnosis diagnosis;
  diagnosis.name = history.name;
  std::set<std::string> covered;
  for (const Rule& rule : rules()) {
    if (covered.contains(rule.info.id)) continue;
    std::optional<Finding> finding = rule.check(run);
    if (!finding.has_value()) continue;
    finding->rule = rule.info.id;
    diagnosis.findings.push_back(*std::move(finding));
    covered.insert(rule.covers.begin(), rule.covers.end());
  }
  const size_t count = diagnosis.findings.size();
  diagnosis.summary = count == 0   ? healthy_summary(run)
                      : count == 1 ? "One thing to change."
                                   : std::to_string(count) +
                                         " things to change, the most "
                                         "important first.";
  return diagnosis;
}

nlohmann::ordered_json diagnosis_json(const Diagnosis& diagnosis) {
  nlohmann::ordered_json findings = nlohmann::ordered_json::array();
  for (const Finding& finding : diagnosis.findings) {
    findings.push_back({{"rule", finding.rule},
                        {"problem", finding.problem},
                        {"change", finding.change},
                        {"command", finding.command},
                        {"code", finding.code}});
  }
  return {{"summary", diagnosis.summary}, {"findings", findings}};
}

}  // namespace internal

std::vector<DiagnosisRule> diagnosis_rules() {
  std::vector<DiagnosisRule> list;
  for (const internal::Rule& rule : internal::rules()) list.push_back(rule.info);
  return list;
}

std::string Diagnosis::to_string(int width) const {
  const auto columns = static_cast<size_t>(std::clamp(width, 40, 200));
  const auto paragraph = [&](const std::string& begin, const std::string& text) {
    return internal::wrapped(begin + internal::printable_line(text), columns, "   ");
  };
  std::string text = findings.empty() ? internal::wrapped(summary, columns) : "";
  for (size_t i = 0; i < findings.size(); ++i) {
    const Finding& finding = findings[i];
    text += paragraph(std::to_string(i + 1) + ". ", finding.problem + " [" + finding.rule + "]");
    text += "   " + internal::wrapped(internal::printable_line(finding.change), columns - 3, "   ");
    if (!finding.command.empty()) text += "     headroom train ... " + finding.command + "\n";
    if (!finding.code.empty()) text += "     " + internal::printable_line(finding.code) + "\n";
  }
  return text;
}

std::vector<Diagnosis> diagnose(const std::string& folder, std::vector<std::string>* left_out) {
  internal::FoundRuns found = internal::read_runs(folder);
  std::vector<Diagnosis> diagnoses;
  for (const internal::ReportRun& run : found.runs) {
    diagnoses.push_back(internal::diagnose_run(*run.history));
    diagnoses.back().place = run.place;
  }
  if (left_out != nullptr) *left_out = std::move(found.left_out);
  return diagnoses;
}

}  // namespace headroom
