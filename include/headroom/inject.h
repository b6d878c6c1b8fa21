// inject: fault injection, to test how a training loop handles bad gradients. See
// docs/reliability.md.
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

/// What a fault does to an element.
enum class FaultKind : uint8_t {
  kOverflow,  // inf or -inf
  kNan,
  kFlip,  // one random bit of the element is flipped
};

/// One kind of fault, and when and where it occurs.
struct Fault {
  FaultKind kind = FaultKind::kOverflow;
  double probability = 1.0;  // in each step to which it applies
  std::string tensor = {};   // name of the parameter; empty: a random one each time
  int64_t count = 1;         // number of elements, limited by the size of the gradient
  int rank = -1;             // rank of a parallel run; -1: all
  int64_t first_step = 0;
  int64_t last_step = std::numeric_limits<int64_t>::max();

  /// Whether the fault may occur on this rank in this step.
  bool applies(int at_rank, int64_t at_step) const {
    return (rank < 0 || rank == at_rank) && at_step >= first_step && at_step <= last_step;
  }
};

/// Parses faults from text: a kind (overflow, nan, flip), a colon, and settings separated by
/// commas:
///
///     overflow:p=0.01,nan:p=0.001,tensor=embed.weight,flip:step=5,rank=1,count=3
///     nan:step=10-20
///
/// A setting without a kind belongs to the fault before it. Throws Error(kInvalidArgument) if the
/// text is malformed. Names that contain a comma are not supported; use a Fault for those.
HEADROOM_API std::vector<Fault> parse_faults(std::string_view text);

/// One element that was changed.
struct Injected {
  FaultKind kind = FaultKind::kOverflow;
  size_t parameter = 0;
  int64_t index = 0;
};

/// Injects faults into gradients, between backward and step(). The faults of a step depend only on
/// the seed, the rank and the step number, so that a resumed run gets the same ones. Thread-safe:
/// it has no mutable state.
///
///     const Injector injector(parse_faults("overflow:p=0.01"), seed);
///     injector.inject(step, optimizer.parameters());
class HEADROOM_API Injector {
 public:
  /// Throws Error(kInvalidArgument) if a setting of a fault is invalid.
  explicit Injector(std::vector<Fault> faults, uint64_t seed = 0, int rank = 0);

  /// Writes to the gradients, in host memory or on a CUDA device (for which it waits), and returns
  /// what it has changed. Throws Error(kInvalidArgument), changing nothing, if a fault names an
  /// unknown parameter.
  std::vector<Injected> inject(int64_t step, const std::vector<Parameter>& parameters) const;

  /// The faults that it injects.
  const std::vector<Fault>& faults() const { return faults_; }

 private:
  std::vector<Fault> faults_;
  uint64_t seed_;
  int rank_;
};

}  // namespace headroom

#endif  // HEADROOM_INJECT_H_
