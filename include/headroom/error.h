// How Headroom says that something is wrong: a code for programs, a sentence for people.
#ifndef HEADROOM_ERROR_H_
#define HEADROOM_ERROR_H_

#include <headroom/export.h>

#include <stdexcept>
#include <string>

namespace headroom {

enum class ErrorCode {
  kInvalidArgument,  // a value that can never work: a scale of 0, null data with a count
  kMismatch,         // two things that do not fit: weight and gradient of different sizes
  kWrongOrder,       // a call at the wrong moment: unscale_ twice, update before step
  kUnsupported,      // understood, but not in this build or not for this type
  kBadState,         // a saved state that is damaged, incomplete or from something else
  kOverflow,         // inf or nan in the gradients, and the caller asked for an exception
  kOutOfMemory,      // of a CUDA device
  kScaleCollapsed,   // the scale is at its floor, or too many steps were skipped in a row
  kFile,             // a file or folder that cannot be made, read or written: no right, no room
  kRankLost,         // another rank is gone, or did not come within the time limit
  kRanksDiffer,      // the ranks are out of step, or have drifted apart
};

/// Short name of a code, such as "invalid argument".
HEADROOM_API const char* to_string(ErrorCode code);

/// Every exception that Headroom throws. what() is one sentence that says what is wrong, where,
/// and what to do. When one is thrown, weights, moments and counters are as they were before the
/// call, unless the function that throws says otherwise.
class HEADROOM_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace headroom

#endif  // HEADROOM_ERROR_H_
