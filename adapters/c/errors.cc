#include "adapters/c/errors.h"

#include <headroom/error.h>

#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

namespace headroom::c {
namespace {

// Fixed memory, so that telling of a failure cannot fail.
thread_local char last_error[1024] = "";
thread_local void* stream = nullptr;

hr_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return HR_ERROR_INVALID_ARGUMENT;
    case ErrorCode::kMismatch:
      return HR_ERROR_MISMATCH;
    case ErrorCode::kWrongOrder:
      return HR_ERROR_WRONG_ORDER;
    case ErrorCode::kUnsupported:
      return HR_ERROR_UNSUPPORTED;
    case ErrorCode::kBadState:
      return HR_ERROR_BAD_STATE;
    case ErrorCode::kOverflow:
      return HR_ERROR_OVERFLOW;
    case ErrorCode::kOutOfMemory:
      return HR_ERROR_OUT_OF_MEMORY;
    case ErrorCode::kScaleCollapsed:
      return HR_ERROR_SCALE_COLLAPSED;
    case ErrorCode::kFile:
      return HR_ERROR_FILE;
    case ErrorCode::kRankLost:
      return HR_ERROR_RANK_LOST;
    case ErrorCode::kRanksDiffer:
      return HR_ERROR_RANKS_DIFFER;
  }
  return HR_ERROR_INTERNAL;
}

hr_status remember(hr_status status, std::string_view function, std::string_view sentence) {
  const size_t start = function.empty() ? 0 : function.size() + 2;
  copy_cut(function, last_error, sizeof(last_error));
  if (start > 0) std::memcpy(last_error + start - 2, ": ", 2);
  copy_cut(sentence, last_error + start, sizeof(last_error) - start);
  return status;
}

}  // namespace

hr_status caught(const char* function) noexcept {
  try {
    throw;
  } catch (const Failure& failure) {
    return remember(failure.status, function, failure.sentence);
  } catch (const Error& error) {
    return remember(status_of(error.code()), "", error.what());
  } catch (const std::bad_alloc&) {
    return remember(HR_ERROR_OUT_OF_MEMORY, function,
                    "there is not enough memory; free some, or use fewer and smaller tensors.");
  } catch (const std::length_error&) {
    return remember(HR_ERROR_OUT_OF_MEMORY, function,
                    "the list is longer than any memory holds; check the count.");
  } catch (const std::exception& error) {
    return remember(HR_ERROR_INTERNAL, function, error.what());
  } catch (...) {
    return remember(HR_ERROR_INTERNAL, function, "something unknown was thrown.");
  }
}

StreamInForce::StreamInForce() {
  if (stream != nullptr) scope_.emplace(stream);
}

void copy_cut(std::string_view text, char* buffer, size_t capacity) noexcept {
  size_t length = text.size();
  if (length >= capacity) {
    length = capacity - 1;
    const auto continues = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };
    while (length > 0 && continues(length)) --length;
  }
  std::memcpy(buffer, text.data(), length);
  buffer[length] = '\0';
}

void give_text(std::string_view text, char* buffer, size_t capacity, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (buffer == nullptr && capacity == 0) return;
  need(buffer, "buffer");
  if (capacity <= text.size()) {
    throw Failure{HR_ERROR_BUFFER_TOO_SMALL, "the text takes " + std::to_string(text.size() + 1) +
                                                 " bytes and the buffer has " +
                                                 std::to_string(capacity) + "; pass a larger one."};
  }
  copy_cut(text, buffer, capacity);
}

}  // namespace headroom::c

using namespace headroom::c;

const char* hr_last_error(void) { return last_error; }

const char* hr_status_name(hr_status status) {
  switch (status) {
    case HR_OK:
      return "ok";
    case HR_ERROR_NULL:
      return "null argument";
    case HR_ERROR_BAD_HANDLE:
      return "bad handle";
    case HR_ERROR_VERSION:
      return "version";
    case HR_ERROR_BUFFER_TOO_SMALL:
      return "buffer too small";
    case HR_ERROR_CALLBACK:
      return "callback failed";
    case HR_ERROR_INTERNAL:
      return "internal error";
  }
  using headroom::ErrorCode;
  for (int code = 0; code <= static_cast<int>(ErrorCode::kRanksDiffer); ++code) {
    if (status_of(ErrorCode{code}) == status) return headroom::to_string(ErrorCode{code});
  }
  return "unknown";
}

hr_status hr_set_stream(void* cuda_stream) {
  return guarded(__func__, [&] {
    if (cuda_stream != nullptr && !headroom::cuda_available()) {
      throw Failure{HR_ERROR_UNSUPPORTED,
                    "there is no CUDA in this build, or no device; pass null."};
    }
    stream = cuda_stream;
  });
}
