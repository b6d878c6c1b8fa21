// Names of error codes, and an error of many classes.
#include <headroom/error.h>
#include <headroom/owned.h>

#include <cstddef>
#include <iterator>

namespace headroom {

const char* to_string(ErrorCode code) {
  // In the order of ErrorCode.
  static constexpr const char* kNames[] = {"invalid argument", "mismatch",        "wrong order",
                                           "unsupported",      "bad state",       "overflow",
                                           "out of memory",    "scale collapsed", "file",
                                           "rank lost",        "ranks differ"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

void internal::throw_moved_from() {
  throw Error(ErrorCode::kInvalidArgument,
              "This object was moved from and is empty; use the one it was moved to.");
}

}  // namespace headroom
