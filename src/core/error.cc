// Names of error codes.
#include <headroom/error.h>

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

}  // namespace headroom
