// The last error of each thread, the thread's stream, and text buffers of callers.
#include "adapters/c/errors.h"

#include <headroom/error.h>

#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

namespace headroom::c {
namespace {

// A fixed buffer: storing an error message must not allocate.
thread_local char last_error[1024] = "";
thread_local void* thread_stream = nullptr;

// The statuses of ErrorCode are its values plus 1, in the same order.
hr_status status_of(ErrorCode code) { return static_cast<hr_status>(code) + 1; }
static_assert(static_cast<int>(ErrorCode::kInvalidArgument) + 1 == HR_ERROR_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorCode::kBadState) + 1 == HR_ERROR_BAD_STATE);
static_assert(static_cast<int>(ErrorCode::kScaleCollapsed) + 1 == HR_ERROR_SCALE_COLLAPSED);
static_assert(static_cast<int>(ErrorCode::kRanksDiffer) + 1 == HR_ERROR_RANKS_DIFFER);

// Writes "function: message" to last_error, truncated. Core errors pass an empty function.
hr_status store_error(hr_status status, std::string_view function, std::string_view message) {
  size_t length = 0;
  const auto append = [&](std::string_view text) {
    copy_truncated(text, last_error + length, sizeof(last_error) - length);
    length += text.size();
  };
  if (!function.empty()) {  // the name of an hr_ function, which always fits
    append(function);
    append(": ");
  }
  append(message);
  return status;
}

}  // namespace

hr_status handle_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const Failure& failure) {
    return store_error(failure.status, function, failure.message);
  } catch (const Error& error) {  // its message names the call already
    return store_error(status_of(error.code()), "", error.what());
  } catch (const std::bad_alloc&) {
    return store_error(HR_ERROR_OUT_OF_MEMORY, function,
                       "out of memory; use fewer or smaller tensors.");
  } catch (const std::length_error&) {
    return store_error(HR_ERROR_OUT_OF_MEMORY, function,
                       "the list is larger than the address space; check its count.");
  } catch (const std::exception& error) {
    return store_error(HR_ERROR_INTERNAL, function, error.what());
  } catch (...) {
    return store_error(HR_ERROR_INTERNAL, function, "unknown exception.");
  }
}

ThreadStreamScope::ThreadStreamScope() {
  if (thread_stream != nullptr) scope_.emplace(thread_stream);
}

void copy_truncated(std::string_view text, char* buffer, size_t capacity) noexcept {
  size_t length = text.size();
  if (length >= capacity) {
    length = capacity - 1;
    // Bytes 10xxxxxx continue a character: do not cut before one.
    const auto continues = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };
    while (length > 0 && continues(length)) --length;
  }
  std::memcpy(buffer, text.data(), length);
  buffer[length] = '\0';
}

void write_text(std::string_view text, char* buffer, size_t capacity, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (buffer == nullptr && capacity == 0) return;
  require(buffer, "buffer");
  if (capacity <= text.size()) {
    throw Failure{HR_ERROR_BUFFER_TOO_SMALL, "the text needs " + std::to_string(text.size() + 1) +
                                                 " bytes and the buffer has " +
                                                 std::to_string(capacity) + "; pass a larger one."};
  }
  copy_truncated(text, buffer, capacity);
}

}  // namespace headroom::c

using namespace headroom::c;

// Valid until this thread's next failure, as the buffer is overwritten in place.
const char* hr_last_error(void) { return last_error; }

const char* hr_status_name(hr_status status) {
  if (status >= HR_ERROR_INVALID_ARGUMENT && status <= HR_ERROR_RANKS_DIFFER) {
    return headroom::to_string(headroom::ErrorCode{status - 1});
  }
  // The statuses that only the C API has.
  static constexpr std::pair<hr_status, const char*> kNames[] = {
      {HR_OK, "ok"},
      {HR_ERROR_NULL, "null argument"},
      {HR_ERROR_BAD_HANDLE, "bad handle"},
      {HR_ERROR_VERSION, "version"},
      {HR_ERROR_BUFFER_TOO_SMALL, "buffer too small"},
      {HR_ERROR_CALLBACK, "callback failed"},
      {HR_ERROR_INTERNAL, "internal error"},
  };
  for (const auto& [known, name] : kNames) {
    if (known == status) return name;
  }
  return "unknown";
}

// Takes effect in the next call: this one has created its ThreadStreamScope already.
hr_status hr_set_stream(void* cuda_stream) {
  return guarded(__func__, [&] {
    if (cuda_stream != nullptr && !headroom::cuda_available()) {
      throw Failure{HR_ERROR_UNSUPPORTED,
                    "this build has no CUDA, or there is no CUDA device; pass null."};
    }
    thread_stream = cuda_stream;
  });
}
