// The floating-point mode in which all results are defined.
#ifndef HEADROOM_SRC_CORE_FLOAT_ENVIRONMENT_H_
#define HEADROOM_SRC_CORE_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace headroom::internal {

/// Sets round-to-nearest and disables flush-to-zero for this thread, and restores the caller's mode
/// at the end of the scope. Frameworks often enable flush-to-zero, which would change results.
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
