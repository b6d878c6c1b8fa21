// Shared by the faults of the table in docs/reliability.md.
#ifndef HEADROOM_TESTS_RELIABILITY_FAULTS_H_
#define HEADROOM_TESTS_RELIABILITY_FAULTS_H_

#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <functional>
#include <string>

namespace hr = headroom;

/// Thrown if a fault corrupted something or was not reported.
struct BrokenPromise {
  std::string what;
};

struct Outcome {
  const char* word;  // "fine" or "reported"
  std::string what;
};

inline void expect(bool ok, const std::string& what) {
  if (!ok) throw BrokenPromise{what};
}

/// The message of the error that `call` must throw.
inline Outcome expect_refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const hr::Error& error) {
    return {"reported", error.what()};
  }
  throw BrokenPromise{"accepted"};
}

// Tensors and optimizers (tensors.cc).
Outcome inf_past_two_to_the_31();
Outcome gradient_of_another_size();
Outcome gradient_moved();
Outcome gradient_cut_to_one_element();
Outcome gradient_without_memory();
Outcome gradient_of_another_type();
Outcome gradient_on_another_device();
Outcome gradient_of_two_parameters();
Outcome same_parameter_listed_twice();
Outcome optimizer_state_of_another_model();
Outcome optimizer_state_in_another_order();

// Two ranks (ranks.cc).
Outcome rank_overflows_before_averaging();
Outcome rank_overflows_after_averaging();
Outcome rank_overflows_in_its_shard();
Outcome rank_without_gradients();
Outcome rank_dies();
Outcome rank_omits_a_step();
Outcome rank_has_one_batch_less();
Outcome ranks_start_with_different_scales();

// Checkpoints (checkpoints.cc).
Outcome checkpoint_truncated();
Outcome checkpoint_with_a_flipped_bit();
Outcome disk_full_while_saving();
Outcome killed_while_saving();

#endif  // HEADROOM_TESTS_RELIABILITY_FAULTS_H_
