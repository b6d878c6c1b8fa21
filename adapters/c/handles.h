// Handles: numbers that are looked up, so that a stale or foreign one is told apart from a good
// one, and locks, so that calls on the same handle wait for one another.
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

/// A mutex that refuses the thread which has it already: a callback that calls back.
class Turn {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_ = {};
};

struct OptimizerEntry;

/// The optimizers that a scaler or an accumulator may look at in any of its calls.
using Circle = std::vector<std::weak_ptr<OptimizerEntry>>;

struct OptimizerEntry {
  uintptr_t number = 0;
  Turn turn;
  std::unique_ptr<Optimizer> object;       // null once destroyed
  GradAccumulator* accumulator = nullptr;  // the object, if it is one
  Circle circle;                           // of an accumulator
  OptimizerState state;                    // what hr_optimizer_get_state gave last
  std::vector<hr_state_tensor> state_tensors;
};

struct ScalerEntry {
  uintptr_t number = 0;
  Turn turn;
  std::unique_ptr<GradScaler> object;  // null once destroyed
  Circle circle;
  Device device = {};
};

/// All living objects of one kind. Never destroyed itself, since other languages may call until the
/// very end of the process.
template <typename Entry, typename Handle>
class Registry {
 public:
  Handle* add(std::shared_ptr<Entry> entry) {
    const std::lock_guard lock(mutex_);
    last_ += 4;
    entry->number = last_;
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
  // Odd, like no address of an object, and of another remainder for each kind of handle.
  uintptr_t last_ = std::is_same_v<Handle, hr_scaler> ? 1 : 3;
};

Registry<ScalerEntry, hr_scaler>& scalers();
Registry<OptimizerEntry, hr_optimizer>& optimizers();

/// An optimizer and the right to use it, for the time of a call.
class OptimizerCall {
 public:
  explicit OptimizerCall(hr_optimizer* handle, const char* name = "optimizer");
  OptimizerEntry& entry() { return *entry_; }
  Optimizer& operator*() { return *entry_->object; }
  Optimizer* operator->() { return entry_->object.get(); }

  /// The optimizer as one of the fused ones, or as one of a kind of them.
  template <typename Kind>
  Kind& as(const char* what) {
    auto* const found = dynamic_cast<Kind*>(entry_->object.get());
    if (found == nullptr) {
      throw Failure{HR_ERROR_UNSUPPORTED, "this optimizer is not " + std::string(what) + "."};
    }
    return *found;
  }

 private:
  std::shared_ptr<OptimizerEntry> entry_;
  std::unique_lock<Turn> lock_;
};

/// A circle and one more optimizer, all locked in an order that is the same in every thread.
class CircleCall {
 public:
  /// `handle` may be null; otherwise it joins the circle.
  CircleCall(Circle* circle, hr_optimizer* handle);
  Optimizer& operator*() { return *chosen_->object; }

 private:
  std::shared_ptr<OptimizerEntry> chosen_;
  std::vector<std::shared_ptr<OptimizerEntry>> entries_;
  std::vector<std::unique_lock<Turn>> locks_;
};

/// A scaler, the optimizers it knows, and one that it is called with (or null).
class ScalerCall {
 public:
  explicit ScalerCall(hr_scaler* handle, hr_optimizer* optimizer = nullptr);
  ScalerEntry& entry() { return *entry_; }
  GradScaler* operator->() { return entry_->object.get(); }
  Optimizer& optimizer() { return **circle_; }

 private:
  std::shared_ptr<ScalerEntry> entry_;
  std::unique_lock<Turn> lock_;
  std::optional<CircleCall> circle_;
};

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_HANDLES_H_
