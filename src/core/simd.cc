// The choice of the SIMD target: the best one of this CPU, HEADROOM_SIMD, or set_simd_target().
#include "core/simd.h"

#include <headroom/runtime.h>
#include <strings.h>

#include <atomic>
#include <cstdlib>

#include "core/check.h"

namespace headroom {
namespace {

// Best first: in Highway's mask, lower bits are better targets. The last one is the baseline that
// the compiler assumes anyway, so the list is never empty.
std::vector<int64_t> runnable_targets() {
  const int64_t runnable = (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS;
  std::vector<int64_t> targets;
  for (int bit = 0; bit < 63; ++bit) {
    if (runnable >> bit & 1) targets.push_back(int64_t{1} << bit);
  }
  return targets;
}

// Throws Error(kInvalidArgument) if this CPU has no such target.
int64_t find_target(const std::string& name) {
  std::string known;
  for (const int64_t target : runnable_targets()) {
    const char* target_name = hwy::TargetName(target);
    if (strcasecmp(target_name, name.c_str()) == 0) return target;
    known += known.empty() ? target_name : std::string(", ") + target_name;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "SIMD target '" + name + "' is unknown or not supported by this CPU; use one of " +
                  known + ".");
}

// Initialised on first use, from HEADROOM_SIMD if it is set. Throws Error(kInvalidArgument), on
// every use, if that names no target of this CPU.
std::atomic<int64_t>& chosen() {
  static std::atomic<int64_t> target = [] {
    const char* forced = std::getenv("HEADROOM_SIMD");
    return forced != nullptr && *forced != '\0' ? find_target(forced) : runnable_targets().front();
  }();
  return target;
}

}  // namespace

std::string simd_target() { return hwy::TargetName(chosen()); }

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (const int64_t target : runnable_targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void set_simd_target(const std::string& name) { chosen() = find_target(name); }

int64_t internal::active_target() { return chosen(); }

}  // namespace headroom
