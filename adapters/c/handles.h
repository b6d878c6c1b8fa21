// Handles and locks. A handle is a number that a registry maps to an object, so that stale and
// foreign handles are detected. Calls on the same handle are serialized.
#ifndef HEADROOM_ADAPTERS_C_HANDLES_H_
#define HEADROOM_ADAPTERS_C_HANDLES_H_

#include <headroom/accumulate.h>
#include <headroom/c.h>
#include <headroom/optimizer.h>
#include <headroom/scaler.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "adapters/c/errors.h"

namespace headroom::c {

/// A mutex whose lock() throws Failure(HR_ERROR_WRONG_ORDER) if this thread holds it already, which
/// happens when a callback uses the handles of the call that it was called from.
class CallMutex {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_ = {};
};

struct OptimizerEntry;

/// The optimizers that a scaler or an accumulator has stepped. The core may access any of them in
/// every call, so every call locks all of them.
using SteppedOptimizers = std::vector<std::weak_ptr<OptimizerEntry>>;

struct OptimizerEntry {
  CallMutex mutex;
  std::unique_ptr<Optimizer> object;       // null after destroy
  GradAccumulator* accumulator = nullptr;  // `object`, if it is an accumulator
  SteppedOptimizers stepped;               // by the accumulator
  // Storage of the last hr_optimizer_get_state().
  OptimizerState state;
  std::vector<hr_state_tensor> state_tensors;
};

struct ScalerEntry {
  CallMutex mutex;
  std::unique_ptr<GradScaler> object;  // null after destroy
  SteppedOptimizers stepped;
};

/// All objects of one kind. Entries are shared, so that destroy does not free a mutex on which
/// another thread waits.
template <typename Entry, typename Handle>
class Registry {
 public:
  Handle* add(std::shared_ptr<Entry> entry) {
    const std::lock_guard lock(mutex_);
    last_ += 4;
    entries_[last_] = std::move(entry);
    return reinterpret_cast<Handle*>(last_);
  }

  std::shared_ptr<Entry> find(const Handle* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(reinterpret_cast<uintptr_t>(handle));
    return found != entries_.end() ? found->second : nullptr;
  }

  void remove(const Handle* handle) {
    const std::lock_guard lock(mutex_);
    entries_.erase(reinterpret_cast<uintptr_t>(handle));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uintptr_t, std::shared_ptr<Entry>> entries_;
  // Handles are odd, unlike the address of an object, and differ modulo 4 between the two kinds.
  uintptr_t last_ = std::is_same_v<Handle, hr_scaler> ? 1 : 3;
};

/// Never destroyed: other languages may call during process exit.
Registry<ScalerEntry, hr_scaler>& scalers();
Registry<OptimizerEntry, hr_optimizer>& optimizers();

/// Locks one optimizer for the duration of a call.
class OptimizerCall {
 public:
  explicit OptimizerCall(hr_optimizer* handle, const char* name = "optimizer");
  OptimizerEntry& entry() { return *entry_; }
  Optimizer& operator*() { return *entry_->object; }
  Optimizer* operator->() { return entry_->object.get(); }

  /// The optimizer as a derived type; throws Failure(HR_ERROR_UNSUPPORTED) if it is another one.
  template <typename Derived>
  Derived& as(const char* description) {
    auto* const found = dynamic_cast<Derived*>(entry_->object.get());
    if (found == nullptr) {
      throw Failure{HR_ERROR_UNSUPPORTED,
                    "this optimizer is not " + std::string(description) + "."};
    }
    return *found;
  }

 private:
  std::shared_ptr<OptimizerEntry> entry_;
  std::unique_lock<CallMutex> lock_;
};

/// Locks `handle` (may be null), after adding it to `stepped`, and all optimizers in `stepped`.
class SteppedCall {
 public:
  SteppedCall(SteppedOptimizers* stepped, hr_optimizer* handle);
  Optimizer& operator*() { return *chosen_->object; }

 private:
  std::shared_ptr<OptimizerEntry> chosen_;
  std::vector<std::shared_ptr<OptimizerEntry>> entries_;
  std::vector<std::unique_lock<CallMutex>> locks_;
};

/// Locks a scaler, the optimizers that it has stepped, and `optimizer` (may be null).
class ScalerCall {
 public:
  explicit ScalerCall(hr_scaler* handle, hr_optimizer* optimizer = nullptr);
  ScalerEntry& entry() { return *entry_; }
  GradScaler* operator->() { return entry_->object.get(); }
  Optimizer& optimizer() { return **stepped_; }

 private:
  std::shared_ptr<ScalerEntry> entry_;
  std::unique_lock<CallMutex> lock_;
  std::optional<SteppedCall> stepped_;
};

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_HANDLES_H_
