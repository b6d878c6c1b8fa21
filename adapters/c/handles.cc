#include "adapters/c/handles.h"

#include <algorithm>

namespace headroom::c {
namespace {

[[noreturn]] void bad_handle(const char* kind) {
  throw Failure{HR_ERROR_BAD_HANDLE, "this is no handle of a living " + std::string(kind) +
                                         "; it was destroyed, is of another kind, or never was."};
}

std::shared_ptr<OptimizerEntry> find_optimizer(hr_optimizer* handle, const char* name) {
  std::shared_ptr<OptimizerEntry> entry = optimizers().find(need(handle, name));
  if (entry == nullptr) bad_handle("optimizer");
  return entry;
}

}  // namespace

void Turn::lock() {
  if (holder_.load() == std::this_thread::get_id()) {
    throw Failure{
        HR_ERROR_WRONG_ORDER,
        "this handle is in use by the call that this callback came from, was passed twice, "
        "or a callback left that call by longjmp, which is not allowed; use it after that "
        "call."};
  }
  mutex_.lock();
  holder_.store(std::this_thread::get_id());
}

void Turn::unlock() {
  holder_.store({});
  mutex_.unlock();
}

Registry<ScalerEntry, hr_scaler>& scalers() {
  static auto& all = *new Registry<ScalerEntry, hr_scaler>;
  return all;
}

Registry<OptimizerEntry, hr_optimizer>& optimizers() {
  static auto& all = *new Registry<OptimizerEntry, hr_optimizer>;
  return all;
}

OptimizerCall::OptimizerCall(hr_optimizer* handle, const char* name)
    : entry_(find_optimizer(handle, name)), lock_(entry_->turn) {
  if (entry_->object == nullptr) bad_handle("optimizer");  // destroyed while this call waited
}

CircleCall::CircleCall(Circle* circle, hr_optimizer* handle) {
  std::erase_if(*circle, [](const auto& entry) { return entry.expired(); });
  if (handle != nullptr) {
    chosen_ = find_optimizer(handle, "optimizer");
    const bool known = std::any_of(circle->begin(), circle->end(),
                                   [&](const auto& entry) { return entry.lock() == chosen_; });
    if (!known) circle->push_back(chosen_);
  }
  for (const auto& entry : *circle) {
    if (auto living = entry.lock()) entries_.push_back(std::move(living));
  }
  // Accumulators come first, because their own calls lock them before they know of the rest.
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a->accumulator == nullptr, a->number) <
           std::pair(b->accumulator == nullptr, b->number);
  });
  for (const auto& entry : entries_) locks_.emplace_back(entry->turn);
  if (chosen_ != nullptr && chosen_->object == nullptr) bad_handle("optimizer");
}

ScalerCall::ScalerCall(hr_scaler* handle, hr_optimizer* optimizer)
    : entry_(scalers().find(need(handle, "scaler"))) {
  if (entry_ == nullptr) bad_handle("scaler");
  lock_ = std::unique_lock(entry_->turn);
  if (entry_->object == nullptr) bad_handle("scaler");
  circle_.emplace(&entry_->circle, optimizer);
}

}  // namespace headroom::c
