// Replaces image.cc where cairo is not installed.
#include <headroom/error.h>

#include "cli/train/image.h"

namespace headroom::cli {

bool can_draw() { return false; }

Picture read_png(const std::string&) {
  throw Error(ErrorCode::kUnsupported,
              "This build of headroom was made without cairo and cannot read images.");
}

void write_panels(const std::string&, const std::string&, const std::vector<Panel>&) {}
void write_curves(const std::string&, const std::string&, const std::vector<Curve>&) {}
Curve curve_of(const std::string& name, const RunResult&) { return {name, {}, {}, {}}; }

}  // namespace headroom::cli
