// record: a Recorder writes the history of a run during training; write_report() converts it to one
// HTML file. docs/record.md describes the format.
#ifndef HEADROOM_RECORD_H_
#define HEADROOM_RECORD_H_

#include <headroom/export.h>
#include <headroom/layers.h>
#include <headroom/policy.h>
#include <headroom/scaler.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Named numbers. Inf and nan are allowed.
using Scalars = std::vector<std::pair<std::string, double>>;

/// The description of a run.
struct RunInfo {
  std::string name;    // for the report; empty: the folder's name
  std::string group;   // a report of several runs compares those of one group
  ScalePolicy policy;  // recorded
  /// Recorded in this order. The report and diagnose() use two of them: "precision" (fp16, bf16 or
  /// fp32), the format of the backward pass, and "steps", the number of steps that the run is going
  /// to have.
  std::vector<std::pair<std::string, std::string>> settings;
  bool tensorboard = false;  // also write an event file for TensorBoard
  /// Continue an existing history, if there is one; see rewind(). A damaged line and everything
  /// after it is dropped, and a note is recorded. A history that cannot be read, or is of another
  /// version, is left unchanged and is an Error.
  bool resume = false;
};

/// Writes `history.jsonl`, and optionally an event file, in a folder of the run. Every line is
/// passed to the operating system as soon as it is complete, so that nothing is lost if the run is
/// killed. Only one Recorder may write to a folder at a time. Not thread-safe. An existing run in
/// the folder is replaced, unless RunInfo::resume is set.
///
///     Recorder recorder("runs/a");
///     if (step % 50 == 1) recorder.layers(step, scaler.get_scale(), measure_layers(parameters));
///     StepReport report = scaler.step(optimizer);
///     recorder.step(step, loss, report);
///     ...
///     recorder.finish();
///     write_report("runs/a");
///
/// Errors are Error(kFile) with the file's name: the disk is full, or the folder cannot be written
/// to or is in use by another Recorder. What was written before stays readable, a partial line is
/// removed, and the Recorder can still be used; the caller decides whether to continue training.
class HEADROOM_API Recorder {
 public:
  /// Creates the folder and its parents.
  explicit Recorder(const std::string& folder, const RunInfo& info = {});
  ~Recorder();  // without finish(), the history looks like that of a killed run
  Recorder(Recorder&&) noexcept;
  Recorder& operator=(Recorder&&) noexcept;

  /// Records one step; `step` increases from call to call. `more` has further values to record:
  /// {"lr", 1e-3}.
  void step(int64_t step, double loss, const StepReport& report, const Scalars& more = {});

  /// Records the statistics of the layers, before or after the step() of the same number. `scale`
  /// is that of the gradients.
  void layers(int64_t step, double scale, const std::vector<LayerStats>& layers);

  /// Records a remark for the reader of the report: "continued in bf16, because ...".
  void note(int64_t step, const std::string& text);

  /// Records that the run continues with other settings, for example in another precision.
  void settings(std::vector<std::pair<std::string, std::string>> settings);

  /// Drops everything after `step`, because the run continues from a checkpoint of that step. If
  /// steps are dropped whose loss or gradients were NaN, a note lists them, so that a batch that
  /// fails in every attempt can be recognised.
  void rewind(int64_t step);

  /// Writes the last line: how the run ended ("finished", "stopped by hand", ...) and its results.
  void finish(const Scalars& results = {}, const std::string& how = "finished");

 private:
  struct Files;
  Files& open(const char* call) const;

  std::unique_ptr<Files> files_;
};

/// Writes the report of the run in `folder`, or of all runs in the folders below it, to `path`
/// (empty: `report.html` in `folder`). The runs may be unfinished. Throws Error(kFile) if there is
/// no run or the report cannot be written. An incomplete last line is ignored. Runs with a damaged
/// history are omitted; the report mentions them, and `left_out`, if it is not null, receives a
/// sentence for each. If no other run is left, throws Error(kBadState) with file and line.
HEADROOM_API void write_report(const std::string& folder, const std::string& path = "",
                               std::vector<std::string>* left_out = nullptr);

}  // namespace headroom

#endif  // HEADROOM_RECORD_H_
