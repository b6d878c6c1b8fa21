// What the faults of the table share.
#ifndef HEADROOM_TESTS_RELIABILITY_FAULTS_H_
#define HEADROOM_TESTS_RELIABILITY_FAULTS_H_

#include <headroom/headroom.h>

#include <functional>
#include <string>

namespace hr = headroom;

struct Harm {  // the promise is broken
  std::string what;
};

struct Outcome {
  const char* word;  // fine or told
  std::string what;
};

inline void expect(bool ok, const std::string& what) {
  if (!ok) throw Harm{what};
}

// The sentence of the error that `call` has to throw.
inline Outcome refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const hr::Error& error) {
    return {"told", error.what()};
  }
  throw Harm{"accepted"};
}

// Those of checkpoints (checkpoints.cc).
Outcome checkpoint_cut_short();
Outcome checkpoint_with_a_flipped_bit();
Outcome disk_full_while_saving();
Outcome killed_while_saving();

#endif  // HEADROOM_TESTS_RELIABILITY_FAULTS_H_
