// record: what happened. A Recorder writes a run's history while it trains; write_report() makes
// one HTML file of it. docs/record.md has the format.
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

/// Numbers with names. Inf and nan are allowed.
using Scalars = std::vector<std::pair<std::string, double>>;

/// What is known of a run before it starts.
struct RunInfo {
  std::string name;    // for the report; empty: the folder's name
  std::string group;   // runs of one group are compared with each other in a report of many
  ScalePolicy policy;  // written down
  std::vector<std::pair<std::string, std::string>> settings;  // written down, in this order
  bool tensorboard = false;  // also write an event file for TensorBoard
  /// Go on with the history that is there, if one is; see rewind(). From a line that is damaged on
  /// it is forgotten, and a note says so; what cannot be read, or does not begin as a history of
  /// this version, stays as it is, and is an Error.
  bool resume = false;
};

/// Writes `history.jsonl`, and an event file if asked to, in a folder of the run's own. Every line
/// is handed to the system as soon as it is complete, so that a run that is killed leaves all it
/// did. One Recorder at a time may write to a folder, and one thread at a time may use it; a run
/// that was there before is replaced, unless RunInfo::resume says otherwise.
///
///     Recorder recorder("runs/a");
///     if (step % 50 == 1) recorder.layers(step, scaler.get_scale(), measure_layers(parameters));
///     StepReport report = scaler.step(optimizer);
///     recorder.step(step, loss, report);
///     ...
///     recorder.finish();
///     write_report("runs/a");
///
/// Errors are Error(kFile) with the file's name: a full disk, a folder that cannot be written to or
/// that another Recorder writes to. What was written before stays readable, a line that did not fit
/// is taken back, and the Recorder can be used on. Whether to train on is the caller's choice.
class HEADROOM_API Recorder {
 public:
  /// Makes the folder and its parents.
  explicit Recorder(const std::string& folder, const RunInfo& info = {});
  ~Recorder();  // without finish(), the history has no last line, as that of a run that was killed
  Recorder(Recorder&&) noexcept;
  Recorder& operator=(Recorder&&) noexcept;

  /// One step; `step` grows from call to call. `more` is written beside the rest: {"lr", 1e-3}.
  void step(int64_t step, double loss, const StepReport& report, const Scalars& more = {});

  /// A look at the layers, before or after the step() of the same number. `scale` is the one that
  /// the gradients have.
  void layers(int64_t step, double scale, const std::vector<LayerStats>& layers);

  /// Something beside the steps, for the reader of the report: "went on in bf16, because ...".
  void note(int64_t step, const std::string& text);

  /// Forgets all that came after `step`, because the run goes on from a checkpoint of that step.
  void rewind(int64_t step);

  /// The last line: how the run ended ("finished", "stopped by hand", ...) and what came out.
  void finish(const Scalars& results = {}, const std::string& how = "finished");

 private:
  struct Files;
  Files& open(const char* call) const;

  std::unique_ptr<Files> files_;
};

/// Writes the report of the run in `folder`, or of all runs in the folders below it, to `path`
/// (empty: `report.html` in `folder`). Works on runs that go on or were killed. Error(kFile) if
/// there is no run or the report cannot be written. A last line that is cut off is left out, and so
/// is one of many runs whose history is damaged; the report says so, and `left_out`, if it is not
/// null, gets a sentence on each of those runs. If there is no other run it is an Error(kBadState)
/// with file and line.
HEADROOM_API void write_report(const std::string& folder, const std::string& path = "",
                               std::vector<std::string>* left_out = nullptr);

}  // namespace headroom

#endif  // HEADROOM_RECORD_H_
