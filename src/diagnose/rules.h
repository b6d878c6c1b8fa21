// The list of rules. Every rule is one function of the facts of a run; wrong advice is worse than
// none, so each speaks only where the history proves its point. tests/cli/diagnose_test.py has a
// recorded run for each in which it must speak, and healthy runs in which none may.
#ifndef HEADROOM_SRC_DIAGNOSE_RULES_H_
#define HEADROOM_SRC_DIAGNOSE_RULES_H_

#include <headroom/diagnose.h>

#include <optional>
#include <vector>

#include "diagnose/facts.h"

namespace headroom::internal {

struct Rule {
  DiagnosisRule info;
  /// The finding, without its id; nothing if the rule does not apply.
  std::optional<Finding> (*check)(const RunFacts& run);
  /// Ids of rules that describe the same trouble less well, and are silent if this one speaks.
  std::vector<const char*> covers = {};
};

/// The most important first.
const std::vector<Rule>& rules();

/// The findings of a run and the sentence on it as a whole. `place` is left empty.
Diagnosis diagnose_run(const History& history);

/// {"summary": ..., "findings": [{"rule": ..., ...}]}.
nlohmann::ordered_json diagnosis_json(const Diagnosis& diagnosis);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_DIAGNOSE_RULES_H_
