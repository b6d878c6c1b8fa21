// Errors: a code for programs and a sentence for people.
#ifndef HEADROOM_ERROR_H_
#define HEADROOM_ERROR_H_

#include <headroom/export.h>

#include <stdexcept>
#include <string>

namespace headroom {

/// Kinds of errors.
enum class ErrorCode {
  kInvalidArgument,  // a value that can never work: a scale of 0, null data with a count
  kMismatch,         // arguments that do not fit together: weight and gradient of different sizes
  kWrongOrder,       // a call at the wrong time: unscale_ twice, update before step
  kUnsupported,      // not supported in this build or for this type
  kBadState,         // a saved state that is damaged, incomplete or of another kind
  kOverflow,         // inf or nan in the gradients, and the caller asked for an exception
  kOutOfMemory,      // of a CUDA device
  kScaleCollapsed,   // the scale is at its floor, or too many steps were skipped in a row
  kFile,             // a file or folder cannot be created, read or written
  kRankLost,         // another rank has ended, or did not answer within the time limit
  kRanksDiffer,      // the ranks are out of step, or their gradients differ
};

/// Short name of a code, such as "invalid argument".
HEADROOM_API const char* to_string(ErrorCode code);

/// Every exception that Headroom throws itself. what() is one sentence: what is wrong, where, and
/// what to do. Weights, moments and counters are unchanged by a call that throws, unless the
/// function's comment says otherwise.
class HEADROOM_API Error : public std::runtime_error {
 public:
  /// A code for programs and a sentence for people.
  Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace headroom

#endif  // HEADROOM_ERROR_H_
