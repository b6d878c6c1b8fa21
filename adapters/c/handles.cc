// The registries of handles, and the locks of one call.
#include "adapters/c/handles.h"

#include <algorithm>

namespace headroom::c {
namespace {

[[noreturn]] void throw_bad_handle(const char* kind) {
  throw Failure{HR_ERROR_BAD_HANDLE,
                "the handle does not refer to an existing " + std::string(kind) +
                    "; it was destroyed, is of the other kind, or is invalid."};
}

// The entry of an optimizer, not locked yet.
std::shared_ptr<OptimizerEntry> find_optimizer(hr_optimizer* handle, const char* name) {
  std::shared_ptr<OptimizerEntry> entry = optimizers().find(require(handle, name));
  if (entry == nullptr) throw_bad_handle("optimizer");
  return entry;
}

}  // namespace

void CallMutex::lock() {
  // No race: only this thread can store its own id.
  if (holder_.load() == std::this_thread::get_id()) {
    throw Failure{HR_ERROR_WRONG_ORDER,
                  "this thread is inside another call with the same handle: a callback used it, it "
                  "was passed twice, or a callback was left by longjmp, which is not allowed."};
  }
  mutex_.lock();
  holder_.store(std::this_thread::get_id());
}

void CallMutex::unlock() {
  holder_.store({});
  mutex_.unlock();
}

// Allocated with new and never deleted; the order of static destructors does not matter then.
Registry<ScalerEntry, hr_scaler>& scalers() {
  static auto& all = *new Registry<ScalerEntry, hr_scaler>;
  return all;
}

Registry<OptimizerEntry, hr_optimizer>& optimizers() {
  static auto& all = *new Registry<OptimizerEntry, hr_optimizer>;
  return all;
}

// Each constructor checks the object after locking: another thread may have destroyed it while this
// one waited for the lock.
OptimizerCall::OptimizerCall(hr_optimizer* handle, const char* name)
    : entry_(find_optimizer(handle, name)), lock_(entry_->mutex) {
  if (entry_->object == nullptr) throw_bad_handle("optimizer");
}

SteppedCall::SteppedCall(SteppedOptimizers* stepped, hr_optimizer* handle) {
  std::erase_if(*stepped, [](const auto& entry) { return entry.expired(); });
  if (handle != nullptr) {
    chosen_ = find_optimizer(handle, "optimizer");
    const bool listed = std::any_of(stepped->begin(), stepped->end(),
                                    [&](const auto& entry) { return entry.lock() == chosen_; });
    if (!listed) stepped->push_back(chosen_);
  }
  for (const auto& entry : *stepped) {
    if (auto living = entry.lock()) entries_.push_back(std::move(living));
  }
  // All threads lock in the same order, so that no two wait for each other. Accumulators come
  // first, because hr_accumulator_step() locks the accumulator before the optimizers it steps.
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a->accumulator == nullptr, a.get()) <
           std::pair(b->accumulator == nullptr, b.get());
  });
  for (const auto& entry : entries_) locks_.emplace_back(entry->mutex);
  if (chosen_ != nullptr && chosen_->object == nullptr) throw_bad_handle("optimizer");
}

ScalerCall::ScalerCall(hr_scaler* handle, hr_optimizer* optimizer)
    : entry_(scalers().find(require(handle, "scaler"))) {
  if (entry_ == nullptr) throw_bad_handle("scaler");
  lock_ = std::unique_lock(entry_->mutex);
  if (entry_->object == nullptr) throw_bad_handle("scaler");
  stepped_.emplace(&entry_->stepped, optimizer);
}

}  // namespace headroom::c
