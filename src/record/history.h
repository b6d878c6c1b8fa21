// record/: the history of a training run (history.jsonl), TensorBoard event files, and the HTML
// report. It must not know about models, optimizers or policies beyond what a history states, and
// nothing about the command line or HTTP.
//
// This header has the in-memory form of a history and its reader. docs/record.md has the format.
#ifndef HEADROOM_SRC_RECORD_HISTORY_H_
#define HEADROOM_SRC_RECORD_HISTORY_H_

#include <headroom/layers.h>

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "record/float_range.h"

namespace headroom::files {
class File;
}

namespace headroom::internal {

inline constexpr const char* kHistoryFile = "history.jsonl";
inline constexpr const char* kEventFile = "events.out.tfevents.headroom";
inline constexpr const char* kReportFile = "report.html";
inline constexpr const char* kHistoryFormat = "headroom-history";
inline constexpr int kHistoryVersion = 1;

// Limits on a line of a history or a trace, so that a hostile file exhausts neither memory nor
// time. A snapshot of 50,000 tensors, far more than known models have, stays below them.
inline constexpr size_t kLongestLine = size_t{64} << 20;  // bytes
inline constexpr size_t kMostValues = size_t{1} << 22;    // each takes 16 to 100 bytes of memory
inline constexpr size_t kMostKeys = 4096;                 // per object; lookup is linear
inline constexpr size_t kDeepest = 16;                    // nested arrays and objects

/// Checks a line of JSON against these limits in one pass, without parsing it. Returns a predicate
/// ("is longer than 64 MiB"), or an empty string if the line is within the limits. The result is
/// unspecified for text that is not JSON.
std::string exceeded_limit(std::string_view line);

/// JSON has no inf and nan: they are written as the strings "inf", "-inf" and "nan".
nlohmann::ordered_json number_json(double value);

struct HistoryStep {
  int64_t step = 0;
  double loss = 0.0;
  double scale = 1.0;
  double grad_norm = 0.0;
  double amax = 0.0;  // the largest unscaled gradient; 0 if the step was skipped
  double seconds = 0.0;
  bool applied = true;
  bool has_inf = false;  // in the gradients of a skipped step
  bool has_nan = false;
  std::string culprit;
};

/// Whether a step was skipped because its loss was not finite, or because its gradients were NaN
/// and none was inf: what a bad batch gives at any scale. A scale that is too high gives inf.
bool is_bad_batch(const HistoryStep& step);

/// One tensor of a snapshot.
struct HistoryLayer {
  int64_t count = 0;
  int64_t zeros = 0;
  int64_t not_finite = 0;
  double amax = 0.0;
  int from = 0;                    // exponent of histogram[0]
  std::vector<int64_t> histogram;  // see GradDetail
};

/// What a tensor's line has of its LayerStats: enough for zones_in() and bounds_in().
LayerStats stats_of(const std::string& name, const HistoryLayer& layer);
Fp16Zones zones_of(const HistoryLayer& layer);

/// The gradients of all layers at one step, as Recorder::layers() wrote them. Its bounds of the
/// scale are those of FP16, whatever the precision of the run.
struct LayerSnapshot {
  int64_t step = 0;
  double scale = 1.0;
  std::string first_to_overflow, first_to_underflow;  // empty if none
  double doublings_left = 0.0;
  double lost = 0.0;
  double subnormal = 0.0;
  std::map<std::string, HistoryLayer> layers;
};

/// The worst values of a tensor over all snapshots, including those that were thinned out.
struct LayerExtremes {
  double lost = 0.0;       // largest share in the precision of the run, see Fp16Zones
  double subnormal = 0.0;  // largest share
  double zeros = 0.0;      // largest share of all elements
};

struct HistoryNote {
  int64_t step = 0;
  std::string text;
};

/// Steps after a checkpoint that were dropped when the run was resumed from it.
struct DroppedAttempt {
  int64_t from = 0;                      // the step of the checkpoint
  int64_t reached = 0;                   // the last step
  std::vector<HistoryStep> bad_batches;  // see is_bad_batch()
};

/// The policy at the start of the run, as far as a reader needs it.
struct HistoryPolicy {
  std::string rule;        // empty if the history does not say
  double min_scale = 0.0;  // 0 if there is no such setting
  double max_scale = 0.0;
  double growth_interval = 0.0;
  double hysteresis = 1.0;
};

struct History {
  std::string name, group, started;
  HistoryPolicy policy;
  std::vector<std::pair<std::string, std::string>> settings;  // the most recent ones
  size_t settings_from = 0;  // index of the first step with these settings
  std::vector<HistoryStep> steps;
  int64_t skipped = 0;
  std::vector<LayerSnapshot> snapshots;  // evenly thinned out if there are many; includes the last
  std::map<std::string, LayerExtremes> extremes;
  std::vector<HistoryNote> notes;
  std::vector<DroppedAttempt> dropped;
  std::string end;  // how the run ended; empty if it is running or was killed
  std::vector<std::pair<std::string, double>> results;
};

/// Reads a history incrementally, so that a running training can be followed. Throws Error(kFile)
/// if the file cannot be read, and Error(kBadState) with file and line if it is damaged; the latter
/// again on every further call.
class HistoryReader {
 public:
  /// If `until` is given, stops before the first line of a later step and before the run's end.
  explicit HistoryReader(std::string path, int64_t until = kAll);

  /// Reads all complete lines that are new. Returns whether the history has changed. A file that
  /// was rewound since the last call is read from its start.
  bool read_more();

  const History& history() const { return history_; }

  /// Total size in bytes of the lines that were read.
  int64_t bytes() const { return bytes_; }

  /// The number of lines read so far, including those before a rewind; a rewind counts as one more.
  /// Every change of the history increases it.
  int64_t lines() const { return lines_before_ + lines_; }

  /// Whether the last line in the file is incomplete: truncated, or still being written.
  bool cut() const { return !rest_.empty(); }

 private:
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  static constexpr size_t kTail = 256;

  bool was_rewound(const files::File& file) const;
  bool is_later(const nlohmann::ordered_json& line) const;
  void read_line(std::string_view text);
  void read_header(const nlohmann::ordered_json& line);
  void read_policy(const nlohmann::ordered_json& line);
  void read_note(const nlohmann::ordered_json& line);
  void read_step(const nlohmann::ordered_json& line);
  void read_snapshot(const nlohmann::ordered_json& line);
  void keep_snapshot(LayerSnapshot snapshot);
  void read_settings(const nlohmann::ordered_json& line);
  void read_end(const nlohmann::ordered_json& line);

  std::string path_;
  int64_t until_ = kAll;
  bool stopped_ = false;  // reached `until`
  int64_t bytes_ = 0;
  int64_t offset_ = 0;  // of the next byte to read
  std::string tail_;    // the last kTail bytes before offset_
  std::string rest_;    // the incomplete line before offset_
  std::string damage_;  // the error in the first line that could not be read
  int64_t lines_ = 0;
  int64_t lines_before_ = 0;  // the last rewind
  int64_t snapshots_seen_ = 0;
  int64_t keep_every_ = 1;  // of the snapshots seen, this one in so many is kept
  History history_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_HISTORY_H_
