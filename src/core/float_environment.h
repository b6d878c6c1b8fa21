// The floating-point mode that all results are defined in.
#ifndef HEADROOM_SRC_CORE_FLOAT_ENVIRONMENT_H_
#define HEADROOM_SRC_CORE_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace headroom::internal {

/// While it lives, this thread rounds to nearest and keeps subnormals, whatever the caller has set;
/// then the caller's mode is back.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CORE_FLOAT_ENVIRONMENT_H_
