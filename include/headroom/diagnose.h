// diagnose: what a recorded run says about its loss scaling, and what to change. Part of
// headroom::tools; docs/diagnose.md lists the rules.
#ifndef HEADROOM_DIAGNOSE_H_
#define HEADROOM_DIAGNOSE_H_

#include <headroom/export.h>

#include <string>
#include <vector>

namespace headroom {

/// One rule of the list.
struct DiagnosisRule {
  const char* id;    // "scale-too-low"
  const char* when;  // the condition, as docs/diagnose.md has it
  const char* cure;  // what the rule advises
};

/// All rules, the most important first.
HEADROOM_API std::vector<DiagnosisRule> diagnosis_rules();

/// What one rule has found in a run.
struct Finding {
  std::string rule;     // id
  std::string problem;  // one sentence, with the evidence
  std::string change;   // one sentence
  std::string command;  // the option of `headroom train` that makes the change; may be empty
  std::string code;     // the line of Python that does; may be empty
};

/// The findings of one run, the most important first.
struct Diagnosis {
  std::string place;  // the run's folder, relative to the one that was asked for; "." for itself
  std::string name;
  std::vector<Finding> findings;
  std::string summary;  // one sentence on the run as a whole: "Nothing is wrong: ..."

  /// The findings, numbered, or the summary if there are none, in lines of at most `width` columns.
  /// Control characters in names are replaced.
  HEADROOM_API std::string to_string(int width = 80) const;
};

/// Diagnoses the run in `folder`, or all runs in the folders below it, in the order in which they
/// started. The runs may be unfinished. Throws Error(kFile) if there is no run. Damaged runs are
/// left out, with a sentence for each in `left_out` if that is not null; if no other run is left,
/// throws Error(kBadState) with file and line.
HEADROOM_API std::vector<Diagnosis> diagnose(const std::string& folder,
                                             std::vector<std::string>* left_out = nullptr);

}  // namespace headroom

#endif  // HEADROOM_DIAGNOSE_H_
