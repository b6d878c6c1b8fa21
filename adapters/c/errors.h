// The C API. Everything that C calls runs inside guarded(), which lets no exception out.
#ifndef HEADROOM_ADAPTERS_C_ERRORS_H_
#define HEADROOM_ADAPTERS_C_ERRORS_H_

#include <headroom/c.h>
#include <headroom/runtime.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace headroom::c {

/// What only a caller from C can do wrong. The sentence gets the function's name before it.
struct Failure {
  hr_status status;
  std::string sentence;
};

/// Turns the exception being handled into a status and this thread's last error.
hr_status caught(const char* function) noexcept;

/// While it lives, the stream that this thread has set is in force.
class StreamInForce {
 public:
  StreamInForce();

 private:
  std::optional<StreamScope> scope_;
};

/// Calls body(), and on_exception() if it throws. Where a callback ends its thread (pthread_exit or
/// cancellation, with glibc) the stack is unwound by something that is no C++ exception and must
/// not be stopped; std::current_exception() does not know it. Our locks are released on its way.
template <typename Body, typename Handler>
auto call_and_catch(const Body& body, const Handler& on_exception) {
  try {
    return body();
  } catch (...) {
    if (std::current_exception() == nullptr) throw;
    return on_exception();
  }
}

template <typename Body>
hr_status guarded(const char* function, const Body& body) {
  return call_and_catch(
      [&]() -> hr_status {
        const StreamInForce stream;
        body();
        return HR_OK;
      },
      [&] { return caught(function); });
}

/// The pointer, if it is one.
template <typename T>
T* need(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw Failure{HR_ERROR_NULL, "'" + std::string(name) + "' is null; pass one."};
  }
  return pointer;
}

/// Copies as much of `text` as fits, whole UTF-8 characters and a 0 at the end.
void copy_cut(std::string_view text, char* buffer, size_t capacity) noexcept;

/// Gives a text to a caller's buffer by the rule of hr_simd_target.
void give_text(std::string_view text, char* buffer, size_t capacity, size_t* needed);

}  // namespace headroom::c

#endif  // HEADROOM_ADAPTERS_C_ERRORS_H_
