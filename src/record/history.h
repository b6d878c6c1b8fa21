// The history of a run as it is on disk, and its reader.
#ifndef HEADROOM_SRC_RECORD_HISTORY_H_
#define HEADROOM_SRC_RECORD_HISTORY_H_

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace headroom::files {
class File;
}

namespace headroom::internal {

inline constexpr const char* kHistoryFile = "history.jsonl";
inline constexpr const char* kEventFile = "events.out.tfevents.headroom";
inline constexpr const char* kReportFile = "report.html";
inline constexpr const char* kHistoryFormat = "headroom-history";
inline constexpr int kHistoryVersion = 1;

// What a line of a history or a trace may hold at most, so that a hostile one takes neither all
// memory nor all time. A look at 50,000 tensors, far more than known models have, stays below these
// limits.
inline constexpr size_t kLongestLine = size_t{64} << 20;  // bytes
inline constexpr size_t kMostValues = size_t{1} << 22;    // each takes 16 to 100 bytes of memory
inline constexpr size_t kMostKeys = 4096;  // of one object; finding a key takes time for each
inline constexpr size_t kDeepest = 16;     // arrays and objects inside each other

/// What makes a line too large to be read, as the end of a sentence; empty if it is not. Costs one
/// pass over the text. For text that is no JSON any answer may come.
std::string beyond_limits(std::string_view line);

/// JSON has no inf and nan: they are written as the strings "inf", "-inf" and "nan".
nlohmann::ordered_json number_json(double value);

struct HistoryStep {
  int64_t step = 0;
  double loss = 0.0;
  double scale = 1.0;
  double grad_norm = 0.0;
  double seconds = 0.0;
  bool applied = true;
  std::string culprit;
};

/// One tensor in one look.
struct HistoryLayer {
  int64_t count = 0;
  int64_t zeros = 0;
  int64_t not_finite = 0;
  double amax = 0.0;
  int from = 0;                    // exponent of histogram[0]
  std::vector<int64_t> histogram;  // as GradDetail's
};

/// One look at the layers.
struct HistoryLook {
  int64_t step = 0;
  double scale = 1.0;
  std::string first_to_overflow, first_to_underflow;  // empty if none
  double doublings_left = 0.0;
  double lost = 0.0;
  double subnormal = 0.0;
  std::map<std::string, HistoryLayer> layers;
};

/// What was worst for a tensor in all looks, also those that were thinned out.
struct LayerExtremes {
  double lost = 0.0;       // largest share, see Fp16Zones
  double subnormal = 0.0;  // largest share
  double zeros = 0.0;      // largest share of all elements
};

/// Something that happened beside the steps.
struct HistoryNote {
  int64_t step = 0;
  std::string text;
};

struct History {
  std::string name, group, started;
  std::vector<std::pair<std::string, std::string>> settings;  // the last that were told
  std::vector<HistoryStep> steps;
  int64_t skipped = 0;
  std::vector<HistoryLook> looks;  // evenly thinned out if they are many; the last is always here
  std::map<std::string, LayerExtremes> extremes;
  std::vector<HistoryNote> notes;
  std::string end;  // how the run ended; empty if it goes on or was killed
  std::vector<std::pair<std::string, double>> results;
};

/// Reads a history, and later what has been added to it since. Errors: Error(kFile) if the file
/// cannot be read, Error(kBadState) with file and line if it is damaged, as often as it is asked.
class HistoryReader {
 public:
  /// Stops before the first line of a later step than `until`, and before the run's end if that is
  /// given.
  explicit HistoryReader(std::string path, int64_t until = kAll);

  /// Reads all complete lines that are new; true if there were any. A file that was rewound since
  /// is read anew.
  bool read_more();

  /// Bytes of the lines that were read.
  int64_t bytes() const { return bytes_; }

  const History& history() const { return history_; }
  int64_t lines() const { return lines_; }

  /// Lines that were ever read; a rewind counts as one. It moves whenever the history does.
  int64_t lines_ever() const { return lines_before_ + lines_; }

  /// The file goes on after the last complete line: that line was cut off, or is being written.
  bool cut() const { return !rest_.empty(); }

 private:
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  static constexpr size_t kTail = 256;

  bool continues(const files::File& file) const;
  bool is_later(const nlohmann::ordered_json& line) const;
  void take(std::string_view line);
  void take_header(const nlohmann::ordered_json& line);
  void take_step(const nlohmann::ordered_json& line);
  void take_look(const nlohmann::ordered_json& line);
  void take_settings(const nlohmann::ordered_json& line);
  void take_note(const nlohmann::ordered_json& line);
  void take_end(const nlohmann::ordered_json& line);

  std::string path_;
  int64_t until_ = kAll;
  bool stopped_ = false;
  int64_t bytes_ = 0;
  int64_t offset_ = 0;  // of the next byte to read
  std::string tail_;    // the bytes before it
  std::string rest_;    // of a line whose end has not been read
  std::string damage_;  // what is wrong with the line after those that were read
  int64_t lines_ = 0;
  int64_t lines_before_ = 0;  // the last rewind
  int64_t looks_seen_ = 0;
  int64_t keep_every_ = 1;  // look
  History history_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_HISTORY_H_
