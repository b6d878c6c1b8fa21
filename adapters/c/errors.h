// adapters/c implements include/headroom/c.h: it converts handles, structs and strings and calls
// the C++ library. No rule of training is decided here.
//
// This header has what every function of the C API needs: guarded(), which turns exceptions into
// statuses, and checks of pointers and text buffers.
#ifndef HEADROOM_ADAPTERS_C_ERRORS_H_
#define HEADROOM_ADAPTERS_C_ERRORS_H_

#include <headroom/c.h>
#include <headroom/runtime.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace headroom::c {

/// An error that only the C API has. hr_last_error() shows the function's name before `message`.
struct Failure {
  hr_status status;
  std::string message;
};

/// Converts the exception being handled to a status and stores its message for hr_last_error().
hr_status handle_exception(const char* function) noexcept;

/// Makes the stream of hr_set_stream() the core's current stream during its lifetime.
class ThreadStreamScope {
 public:
  ThreadStreamScope();

 private:
  std::optional<StreamScope> scope_;
};

/// Returns body(), or on_exception() if it throws. A thread that ends inside a callback
/// (pthread_exit or cancellation, with glibc) unwinds the stack with a forced exception, which
/// must be rethrown or glibc aborts. std::current_exception() is null for it.
template <typename Body, typename Handler>
auto call_and_catch(const Body& body, const Handler& on_exception) {
  try {
    return body();
  } catch (...) {
    if (std::current_exception() == nullptr) throw;
    return on_exception();
  }
}

/// Runs the body of a C function: on this thread's stream, with every exception converted to a
/// status.
template <typename Body>
hr_status guarded(const char* function, const Body& body) {
  return call_and_catch(
      [&]() -> hr_status {
        const ThreadStreamScope stream;
        body();
        return HR_OK;
      },
      [&] { return handle_exception(function); });
}

/// Returns `pointer`; throws Failure(HR_ERROR_NULL) if it is null.
template <typename T>
T* require(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw Failure{HR_ERROR_NULL, "'" + std::string(name) + "' is null; pass a valid pointer."};
  }
  return pointer;
}

/// Copies `text` to `buffer`, terminated by 0. Text that does not fit is truncated between UTF-8
/// characters.
void copy_truncated(std::string_view text, char* buffer, size_t capacity) noexcept;

/// Writes `text` to the caller's buffer as documented at hr_simd_target().
void write_text(std::string_view text, char* buffer, size_t capacity, size_t* needed);

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_ERRORS_H_
