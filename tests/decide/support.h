// Names and helpers that the tests of decide share.
#ifndef HEADROOM_TESTS_DECIDE_SUPPORT_H_
#define HEADROOM_TESTS_DECIDE_SUPPORT_H_

#include "core/check.h"
#include "decide/transition.h"
#include "decide/verdict.h"
#include "tests/support.h"

namespace headroom {

using internal::decide;
using internal::initial_numbers;
using internal::inverse;
using internal::ScaleNumbers;
using internal::Verdict;

/// One update, with the overflow flag as the only measurement.
inline Alarm advance(const ScalePolicy& policy, bool overflow, ScaleNumbers* numbers) {
  return internal::advance(policy, StepSeen{overflow, 0.0}, numbers);
}

}  // namespace headroom

#endif  // HEADROOM_TESTS_DECIDE_SUPPORT_H_
