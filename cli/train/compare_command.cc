#include <fmt/format.h>
#include <headroom/diagnose.h>
#include <headroom/error.h>

#include <cmath>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/train/image.h"
#include "cli/train/options.h"
#include "cli/train/watch.h"
#include "record/history.h"

namespace headroom::cli {
namespace {

struct Variant {
  const char* name;
  const char* folder;
  const char* precision;
  std::string loss_scale;
};

struct CompareOptions {
  std::vector<std::string> models = {"field", "lm"};
  TrainConfig config;
  double static_scale = 1024.0;
  int64_t seeds = 1;
};

std::vector<Variant> variants(const CompareOptions& options) {
  const std::string fixed = fmt::format("static:{}", options.static_scale);
  return {{"fp32", "fp32", "fp32", "none"},
          {"fp16, no scaling", "fp16-none", "fp16", "none"},
          {"fp16, static scale", "fp16-static", "fp16", fixed},
          {"fp16, dynamic scale", "fp16-dynamic", "fp16", "dynamic"},
          {"fp16, headroom policy", "fp16-headroom", "fp16", "headroom"},
          {"bf16, no scaling", "bf16-none", "bf16", "none"}};
}

// Formats a number.
auto in(const char* format) {
  return [format](double value) { return fmt::format(fmt::runtime(format), plain_nan(value)); };
}

// The mean of a number over the seeds; with half its range if there are several.
template <typename Show, typename Get>
std::string cell(const std::vector<RunResult>& runs, const Show& show, const Get& get) {
  double sum = 0.0, low = INFINITY, high = -INFINITY;
  for (const RunResult& run : runs) {
    const auto value = static_cast<double>(get(run));
    sum += value;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  const double mean = sum / static_cast<double>(runs.size());
  const double spread = low <= high ? (high - low) / 2.0 : NAN;
  return runs.size() > 1 ? show(mean) + " +-" + show(spread) : show(mean);
}

std::string lost_cell(const std::vector<RunResult>& runs) {
  if (runs[0].lost.values == 0) return "-";
  return cell(runs, in("{:.1f} %"), [](const RunResult& run) {
    return 100.0 * static_cast<double>(run.lost.zeroed) / static_cast<double>(run.lost.values);
  });
}

void print_table(const std::vector<Variant>& rows,
                 const std::vector<std::vector<RunResult>>& results) {
  std::vector<std::vector<std::string>> table = {{"run", "final loss", results[0][0].metric_name,
                                                  "skipped", "final scale", "gradients lost",
                                                  "time"}};
  for (size_t i = 0; i < results.size(); ++i) {
    const std::vector<RunResult>& runs = results[i];
    table.push_back({rows[i].name,
                     cell(runs, in("{:.4g}"), [](const RunResult& r) { return r.score.loss; }),
                     cell(runs, in("{:.4f}"), [](const RunResult& r) { return r.score.metric; }),
                     cell(runs, in("{:.0f}"), [](const RunResult& r) { return r.skipped; }),
                     cell(runs, scale_number, [](const RunResult& r) { return r.final_scale; }),
                     lost_cell(runs),
                     cell(runs, in("{:.1f} s"), [](const RunResult& r) { return r.seconds; })});
  }
  std::vector<size_t> widths(table[0].size(), 0);
  for (const auto& row : table) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : table) {
    std::string line = fmt::format("  {:<{}}", row[0], widths[0]);
    for (size_t c = 1; c < row.size(); ++c) line += fmt::format("  {:>{}}", row[c], widths[c]);
    if (&row == table.data()) {
      print_bold(line + "\n");
    } else {
      print("{}\n", line);
    }
  }
}

const char* explanation(const TrainConfig& config) {
  if (!config.data.empty()) return "";
  if (config.model == "field") {
    return "A network fits the displacement of a plate, left in metres: values of about 1e-3, so\n"
           "the gradients of the mean squared error fall below 6e-8, the smallest number FP16 "
           "has.\n"
           "Training on the field in millimetres would help as well.";
  }
  if (config.model == "lm") {
    return "A softmax model of 1024 words whose loss is the mean over N words: the gradient p/N of "
           "each\n"
           "word that did not follow vanishes in FP16, while that of the word that followed "
           "survives.\n"
           "Summing the loss instead of averaging it would help as well.";
  }
  return "";
}

TrainConfig config_of(const CompareOptions& options, const std::string& model,
                      const Variant& variant) {
  TrainConfig config = options.config;
  config.model = model;
  config.precision = variant.precision;
  config.loss_scale = variant.loss_scale;
  if (config.precision == "fp32") config.opt_level.clear();
  resolve(&config);
  return config;
}

void print_heading(const CompareOptions& options, const TrainConfig& config) {
  const uint64_t last_seed = config.seed + static_cast<uint64_t>(options.seeds) - 1;
  print("\n{}: {} steps, batch {}, {} {}, seed {}{}\n{}\n", config.model, config.steps,
        config.batch * config.accumulate, config.optimizer, config.lr, config.seed,
        options.seeds > 1 ? fmt::format(" to {}", last_seed) : "", explanation(config));
  flush_output();
}

std::string folder_of(const CompareOptions& options, const std::string& model,
                      const Variant& variant, uint64_t seed) {
  const std::string folder = fmt::format("{}/{}/{}", options.config.out, model, variant.folder);
  return options.seeds > 1 ? fmt::format("{}/seed{}", folder, seed) : folder;
}

// Trains one variant with every seed. Stops early if the user interrupts.
std::vector<RunResult> run_variant(const CompareOptions& options, const std::string& model,
                                   const Variant& variant, bool first) {
  std::vector<RunResult> runs;
  for (int64_t i = 0; i < options.seeds; ++i) {
    TrainConfig config = config_of(options, model, variant);
    config.seed += static_cast<uint64_t>(i);
    const auto task = make_task(config);
    if (first && i == 0) print_heading(options, config);
    RunInfo info;
    info.name = variant.name;
    info.group = model;
    if (options.seeds > 1) info.name += fmt::format(", seed {}", config.seed);
    const std::string folder = folder_of(options, model, variant, config.seed);
    runs.push_back(run_with_progress(config, *task, info, folder));
    if (!runs.back().not_saved.empty()) throw Error(ErrorCode::kFile, runs.back().not_saved);
    if (runs.back().interrupted) break;
  }
  return runs;
}

// The most important advice on the first seed of every variant that needs one.
void print_advice(const CompareOptions& options, const std::string& model,
                  const std::vector<Variant>& rows) {
  bool any = false;
  for (const Variant& row : rows) {
    const uint64_t seed = config_of(options, model, row).seed;
    const Diagnosis diagnosis = diagnose(folder_of(options, model, row, seed)).at(0);
    if (diagnosis.findings.empty()) continue;
    const Finding& first = diagnosis.findings[0];
    if (!any)
      print("\n  What to change (`headroom diagnose {}/{}` says why):\n", options.config.out,
            model);
    any = true;
    print("  {}: {}\n", row.name, first.command.empty() ? first.change : first.command);
  }
}

// The first seed of every variant as pictures.
void draw(const std::string& folder, const std::string& model, const std::vector<Variant>& rows,
          const std::vector<std::vector<RunResult>>& results) {
  std::vector<Curve> curves;
  std::vector<Panel> panels;
  const Picture& target = results[0][0].target;
  if (!target.values.empty()) panels.push_back({"true field", "", target});
  for (size_t i = 0; i < results.size(); ++i) {
    const RunResult& first = results[i][0];
    curves.push_back(curve_of(rows[i].name, first));
    if (first.picture.values.empty()) continue;
    panels.push_back({rows[i].name, fmt::format("{} {:.4f}", first.metric_name, first.score.metric),
                      first.picture});
  }
  print("\n  {}/curves.png\n", folder);
  write_curves(folder + "/curves.png", model, curves);
  if (panels.empty()) return;
  print("  {}/field.png\n", folder);
  write_panels(folder + "/field.png", model, panels);
}

// Returns false if the user interrupted it.
bool compare_model(const CompareOptions& options, const std::string& model) {
  const std::vector<Variant> rows = variants(options);
  std::vector<std::vector<RunResult>> results;
  bool interrupted = false;
  for (const Variant& variant : rows) {
    results.push_back(run_variant(options, model, variant, results.empty()));
    interrupted = results.back().back().interrupted;
    if (interrupted) break;
  }
  print("\n");
  print_table(rows, results);
  for (size_t i = 0; i < results.size(); ++i) {
    for (const RunResult& run : results[i]) {
      if (!run.alarm.empty()) print("  {}: stopped. {}\n", rows[i].name, run.alarm);
      if (run.interrupted) {
        print("  {}: stopped by hand after {} steps.\n", rows[i].name, run.steps.size());
      }
    }
  }
  if (!interrupted) print_advice(options, model, rows);
  if (can_draw()) draw(options.config.out + "/" + model, model, rows, results);
  return !interrupted;
}

int compare(const CompareOptions& options) {
  if (options.seeds < 1 || options.seeds > 1000) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--seeds is {}; it must be from 1 to 1000.", options.seeds));
  }
  if (!options.config.data.empty() && options.models.size() > 1) {
    throw Error(ErrorCode::kInvalidArgument, "--data is for a single model; name that model.");
  }
  for (const std::string& model : options.models) {  // report all mistakes before the first step
    for (const Variant& variant : variants(options)) config_of(options, model, variant);
  }
  if (launch_from_environment().several()) {
    throw Error(ErrorCode::kUnsupported,
                "compare trains in one process; only `headroom train` runs on several ranks.");
  }
  const std::string& out = options.config.out;
  if (std::filesystem::exists(std::filesystem::path(out) / internal::kHistoryFile)) {
    refuse(
        fmt::format("--out is '{}', which is the folder of a single run, and the report there "
                    "would show only that run; choose another folder.",
                    out));
  }
  const Interrupt interrupt;
  bool interrupted = false;
  for (const std::string& model : options.models) {
    if (interrupted) break;
    interrupted = !compare_model(options, model);
  }
  std::vector<std::string> left_out;
  write_report(out, "", &left_out);
  print_left_out(left_out);
  print("\n  {}/report.html\n", out);
  return interrupted ? 130 : 0;
}

}  // namespace

void add_compare(CLI::App& app, Action* action) {
  const auto options = std::make_shared<CompareOptions>();
  options->config.out = "headroom-compare";
  CLI::App* const command = app.add_subcommand("compare", kAboutCompare);
  command->add_option("--model,model", options->models, "field, lm, mlp, cnn, gpt")
      ->capture_default_str();
  command->add_option("--static", options->static_scale, "scale of the static run")
      ->capture_default_str();
  command->add_option("--seeds", options->seeds, "number of seeds to train with")
      ->capture_default_str();
  command->add_option("--out", options->config.out, "folder for histories, report and plots")
      ->capture_default_str();
  add_training_options(*command, &options->config);
  command->callback([=] { *action = [=] { return compare(*options); }; });
}

}  // namespace headroom::cli
