#include <headroom/error.h>

namespace headroom {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kWrongOrder:
      return "wrong order";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kBadState:
      return "bad state";
    case ErrorCode::kOverflow:
      return "overflow";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
    case ErrorCode::kScaleCollapsed:
      return "scale collapsed";
    case ErrorCode::kFile:
      return "file";
    case ErrorCode::kRankLost:
      return "rank lost";
    case ErrorCode::kRanksDiffer:
      return "ranks differ";
  }
  return "unknown";
}

}  // namespace headroom
