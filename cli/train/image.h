// Pictures in and out: PNG files, and drawings of what training did.
#ifndef HEADROOM_CLI_TRAIN_IMAGE_H_
#define HEADROOM_CLI_TRAIN_IMAGE_H_

#include <string>
#include <vector>

#include "cli/train/run.h"
#include "cli/train/task.h"

namespace headroom::cli {

/// False if this build has no library for pictures: then files are not written and reading throws.
bool can_draw();

/// Red, green and blue from 0 to 1. Throws Error(kInvalidArgument) if the file is no image.
Picture read_png(const std::string& path);

struct Panel {
  std::string title;
  std::string caption;
  Picture picture;
};

/// The panels side by side. Those of one channel share the colour scale of the first.
void write_panels(const std::string& path, const std::string& title,
                  const std::vector<Panel>& panels);

struct Curve {
  std::string name;
  std::vector<double> loss;
  std::vector<double> scale;
  std::vector<int64_t> skipped;  // steps, from 1
};

Curve curve_of(const std::string& name, const RunResult& result);

/// Loss and scale over steps, both on logarithmic axes, skipped steps marked.
void write_curves(const std::string& path, const std::string& title,
                  const std::vector<Curve>& curves);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_IMAGE_H_
