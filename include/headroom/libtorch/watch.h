// The range watch for LibTorch: measures the result of every operation of a step on its device.
#ifndef HEADROOM_LIBTORCH_WATCH_H_
#define HEADROOM_LIBTORCH_WATCH_H_

#include <headroom/export.h>
#include <headroom/ranges.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace headroom::libtorch {

/// Which operation of forward or backward leaves FP16's range first:
///
///     Watch watch(*model);
///     if (step % 50 == 0) watch.begin();
///     loss = criterion(model->forward(x), y);
///     scaler.scale(loss).backward();
///     watch.finish();                                   // does nothing without begin()
///     if (watch.ready()) std::cout << RangeReport(watch.rows()).to_string();
///
/// Between begin() and finish() the operations of this thread, and of the backward passes that it
/// starts, are measured by one kernel each. Nothing waits except rows(). Operations have LibTorch's
/// names ("addmm"); an operation of backward has the name of the forward operation that it belongs
/// to. LibTorch's modules have no hooks: name parts of the model with WatchScope. RangeReport is in
/// headroom::tools.
class HEADROOM_API Watch {
 public:
  /// Parameters are called by their names in `model`.
  explicit Watch(const torch::nn::Module& model);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// Throws Error(kWrongOrder) if another Watch of this process is between begin() and finish().
  void begin();
  void finish();

  /// Whether rows() would return without waiting; false before the first finish().
  bool ready() const;

  /// The rows of the last watched step, in program order. Throws Error(kWrongOrder) before
  /// finish().
  std::vector<RangeRow> rows() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// In its scope, forward operations of this thread belong to this module: "block.3.mlp".
class HEADROOM_API WatchScope {
 public:
  /// Operations of this thread belong to this module until the scope ends.
  explicit WatchScope(std::string module);
  ~WatchScope();
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;
};

}  // namespace headroom::libtorch

#endif  // HEADROOM_LIBTORCH_WATCH_H_
