// inject: faults on purpose, to see that a training loop bears them. docs/reliability.md.
#ifndef HEADROOM_INJECT_H_
#define HEADROOM_INJECT_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

enum class FaultKind : uint8_t {
  kOverflow,  // inf or -inf
  kNan,
  kFlip,  // one bit of the element, whichever
};

/// One kind of fault and when it strikes.
struct Fault {
  FaultKind kind = FaultKind::kOverflow;
  double probability = 1.0;  // in each step it applies to
  std::string tensor = {};   // the parameter whose gradient it hits; empty: any, each time another
  int64_t count = 1;         // elements it hits at once, at most as many as there are
  int rank = -1;             // the rank of a parallel run that it hits; -1: all
  int64_t first_step = 0;
  int64_t last_step = std::numeric_limits<int64_t>::max();

  bool applies(int at_rank, int64_t at_step) const {
    return (rank < 0 || rank == at_rank) && at_step >= first_step && at_step <= last_step;
  }
};

/// Faults as text: a kind (overflow, nan, flip), a colon, and what is said about it, with commas:
///
///     overflow:p=0.01,nan:p=0.001,tensor=embed.weight,flip:step=5,rank=1,count=3
///     nan:step=10-20
///
/// An entry without a kind belongs to the one before. Throws Error(kInvalidArgument) with a
/// sentence. A name with a comma in it cannot be written this way; use a Fault for it.
HEADROOM_API std::vector<Fault> parse_faults(std::string_view text);

/// What was done to one element.
struct Injected {
  FaultKind kind = FaultKind::kOverflow;
  size_t parameter = 0;
  int64_t index = 0;
};

/// Puts faults into gradients, between backward and step(). What it does in a step depends on the
/// seed, the rank and the step alone, not on the steps before: a run that is resumed meets the same
/// faults. It has no state that changes: any number of threads may use one.
///
///     const Injector injector(parse_faults("overflow:p=0.01"), seed);
///     injector.inject(step, optimizer.parameters());
class HEADROOM_API Injector {
 public:
  /// Throws Error(kInvalidArgument) if a fault cannot be.
  explicit Injector(std::vector<Fault> faults, uint64_t seed = 0, int rank = 0);

  /// Writes to the gradients, on the CPU or a CUDA device (which it waits for), and says what it
  /// did. Throws Error(kInvalidArgument), having done nothing, if a fault names a parameter that is
  /// not there.
  std::vector<Injected> inject(int64_t step, const std::vector<Parameter>& parameters) const;

  const std::vector<Fault>& faults() const { return faults_; }

 private:
  std::vector<Fault> faults_;
  uint64_t seed_;
  int rank_;
};

}  // namespace headroom

#endif  // HEADROOM_INJECT_H_
