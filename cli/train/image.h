// PNG input, and plots of training runs.
#ifndef HEADROOM_CLI_TRAIN_IMAGE_H_
#define HEADROOM_CLI_TRAIN_IMAGE_H_

#include <string>
#include <vector>

#include "cli/train/run.h"
#include "cli/train/task.h"

namespace headroom::cli {

/// Whether this build has cairo. Without it, nothing is written and reading throws.
bool can_draw();

/// Reads red, green and blue as values from 0 to 1. Throws Error(kInvalidArgument) if the file is
/// not a PNG image.
Picture read_png(const std::string& path);

struct Panel {
  std::string title;
  std::string caption;
  Picture picture;
};

/// Draws the panels side by side. Those with one channel share the colour scale of the first.
void write_panels(const std::string& path, const std::string& title,
                  const std::vector<Panel>& panels);

struct Curve {
  std::string name;
  std::vector<double> loss;
  std::vector<double> scale;
  std::vector<int64_t> skipped;  // steps, from 1
};

Curve curve_of(const std::string& name, const RunResult& result);

/// Plots loss and scale over steps on logarithmic axes and marks skipped steps.
void write_curves(const std::string& path, const std::string& title,
                  const std::vector<Curve>& curves);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_TRAIN_IMAGE_H_
