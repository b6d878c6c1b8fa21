#ifndef HEADROOM_OWNED_H_
#define HEADROOM_OWNED_H_

#include <headroom/export.h>

#include <memory>
#include <utility>

namespace headroom::internal {

/// Throws Error(kInvalidArgument): the object that is used was moved from.
[[noreturn]] HEADROOM_API void throw_moved_from();

/// The implementation of a class that can be moved: a std::unique_ptr that throws instead of
/// dereferencing null, which is what a move leaves behind.
template <typename T>
class Owned {
 public:
  Owned() = default;
  Owned(std::unique_ptr<T> object)  // NOLINT(google-explicit-constructor)
      : object_(std::move(object)) {}

  T& operator*() const {
    if (object_ == nullptr) throw_moved_from();
    return *object_;
  }
  T* operator->() const { return &**this; }

 private:
  std::unique_ptr<T> object_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_OWNED_H_
