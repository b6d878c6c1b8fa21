// inject/: corrupts gradients on purpose, to test how a training loop reacts. It must not know
// about scaling or optimizers.
#include <headroom/inject.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/cuda.h"

namespace headroom {
namespace {

// The SplitMix64 generator. Each fault of each step and rank gets its own generator, seeded by
// these numbers, so that a resumed run sees the same faults.
class RandomNumbers {
 public:
  explicit RandomNumbers(std::initializer_list<uint64_t> seeds) {
    for (const uint64_t seed : seeds) state_ = mix(state_ ^ mix(seed + kStep));
  }
  uint64_t next() { return mix(state_ += kStep); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // in [0, 1)
  size_t below(size_t count) { return static_cast<size_t>(next() % count); }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, SplitMix64's
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_ = 0;
};

// The bit patterns below are indexed by DType: f16, bf16, f32, f64.
uint64_t infinity_bits(DType dtype) {
  constexpr uint64_t kBits[] = {0x7C00, 0x7F80, 0x7F800000, 0x7FF0000000000000};
  return kBits[static_cast<size_t>(dtype)];
}

uint64_t nan_bits(DType dtype) {  // quiet NaN
  constexpr uint64_t kBits[] = {0x7E00, 0x7FC0, 0x7FC00000, 0x7FF8000000000000};
  return kBits[static_cast<size_t>(dtype)];
}

// Changes one element. For a tensor on a CUDA device it waits for the copies.
void corrupt(FaultKind kind, const TensorView& grad, int64_t index, RandomNumbers* random) {
  const size_t size = size_of(grad.dtype);
  char* const at = static_cast<char*>(grad.data) + static_cast<size_t>(index) * size;
  const uint64_t number = random->next();
  uint64_t bits = 0;  // little-endian: the low bytes are the element's
  switch (kind) {
    case FaultKind::kOverflow:
      bits = infinity_bits(grad.dtype) | (number & 1) << (8 * size - 1);  // with a random sign
      break;
    case FaultKind::kNan:
      bits = nan_bits(grad.dtype);
      break;
    case FaultKind::kFlip:
      internal::copy_memory(grad.device, &bits, at, size);
      bits ^= uint64_t{1} << number % (8 * size);
      break;
  }
  internal::copy_memory(grad.device, at, &bits, size);
}

}  // namespace

// Validates everything that does not depend on the parameters.
Injector::Injector(std::vector<Fault> faults, uint64_t seed, int rank)
    : faults_(std::move(faults)), seed_(seed), rank_(rank) {
  using internal::require;
  for (const Fault& fault : faults_) {
    require(fault.kind <= FaultKind::kFlip, ErrorCode::kInvalidArgument,
            [] { return "The kind of a fault must be kOverflow, kNan or kFlip."; });
    require(fault.probability >= 0.0 && fault.probability <= 1.0, ErrorCode::kInvalidArgument, [&] {
      return "The probability of a fault is " + internal::number(fault.probability) +
             "; it must be from 0 to 1.";
    });
    require(fault.count >= 1, ErrorCode::kInvalidArgument, [&] {
      return "A fault hits " + std::to_string(fault.count) + " elements; it must be 1 or more.";
    });
    require(fault.first_step >= 0 && fault.last_step >= fault.first_step,
            ErrorCode::kInvalidArgument, [&] {
              return "A fault is for steps " + std::to_string(fault.first_step) + " to " +
                     std::to_string(fault.last_step) +
                     "; the first must be 0 or more and not "
                     "after the last.";
            });
  }
}

std::vector<Injected> Injector::inject(int64_t step,
                                       const std::vector<Parameter>& parameters) const {
  // A fault whose tensor is missing is an error even in steps in which it does not apply, so that a
  // misspelt name is found at once.
  for (const Fault& fault : faults_) {
    const auto named = [&](const Parameter& parameter) { return parameter.name == fault.tensor; };
    const bool there =
        fault.tensor.empty() || std::any_of(parameters.begin(), parameters.end(), named);
    internal::require(there, ErrorCode::kInvalidArgument, [&] {
      return "A fault is for '" + fault.tensor + "', but there is no parameter of that name.";
    });
  }
  struct Hit {
    const Fault* fault;
    size_t target;  // index of the parameter
    RandomNumbers random;
  };
  std::vector<Hit> hits;  // validated first, so that an error leaves all gradients unchanged
  for (size_t i = 0; i < faults_.size(); ++i) {
    const Fault& fault = faults_[i];
    if (!fault.applies(rank_, step)) continue;
    RandomNumbers random({seed_, static_cast<uint64_t>(rank_), static_cast<uint64_t>(step), i});
    if (random.unit() >= fault.probability) continue;
    // Parameters without a gradient cannot be hit.
    std::vector<size_t> targets;
    for (size_t k = 0; k < parameters.size(); ++k) {
      const Parameter& parameter = parameters[k];
      if (!fault.tensor.empty() && parameter.name != fault.tensor) continue;
      if (parameter.grad.count > 0) targets.push_back(k);
    }
    if (targets.empty()) continue;
    const size_t target = targets[random.below(targets.size())];
    const TensorView& grad = parameters[target].grad;
    internal::check_view(grad, internal::Access::kWrite,
                         [&] { return "The gradient of " + parameters[target].name; });
    hits.push_back({&fault, target, random});
  }
  // From here on nothing throws but a failing CUDA copy.
  std::vector<Injected> done;
  for (Hit& hit : hits) {
    const TensorView& grad = parameters[hit.target].grad;
    std::set<int64_t> indices;  // distinct elements; drawing with rejection is fast for few of them
    while (static_cast<int64_t>(indices.size()) < std::min(hit.fault->count, grad.count)) {
      const auto index = static_cast<int64_t>(hit.random.below(static_cast<size_t>(grad.count)));
      if (!indices.insert(index).second) continue;
      corrupt(hit.fault->kind, grad, index, &hit.random);
      done.push_back({hit.fault->kind, hit.target, index});
    }
  }
  return done;
}

}  // namespace headroom
