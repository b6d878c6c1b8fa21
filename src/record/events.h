// TensorBoard event files, written without TensorFlow: TFRecords of Event protocol buffers.
#ifndef HEADROOM_SRC_RECORD_EVENTS_H_
#define HEADROOM_SRC_RECORD_EVENTS_H_

#include <headroom/measure.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/write.h"

namespace headroom::internal {

/// CRC-32C (Castagnoli), the checksum of TFRecords.
uint32_t crc32c(std::string_view bytes);

/// The range of the bins of a histogram between its first and its last count; empty if all are 0.
std::pair<size_t, size_t> nonempty_bins(const GradDetail& detail);

/// The values of one step, serialised as a Summary message.
class Summary {
 public:
  void scalar(std::string_view tag, double value);

  /// Adds the histogram of log2 |x| as counted by measure(). Logarithms, because TensorBoard's axis
  /// is linear and would show all gradients at 0. Adds nothing if the histogram is empty.
  void log2_histogram(std::string_view tag, const GradDetail& detail);

  /// The two messages by which the HParams plugin finds a run: its settings at the start, where
  /// texts that are numbers become numbers, and whether it succeeded at the end.
  void session_start(const std::vector<std::pair<std::string, std::string>>& settings);
  void session_end(bool success);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// An event file. Throws Error(kFile); see files::GrowingFile.
class EventFile {
 public:
  explicit EventFile(const std::string& path) : file_(path) {}  // keeps existing events
  void add(int64_t step, const Summary& summary);

  /// Adds a summary of no particular step, which rewind() keeps.
  void add(const Summary& summary);

  /// Drops all events after `step`, and everything from the first damaged record on. Writes the
  /// header if the file is empty then, and returns whether it did.
  bool rewind(int64_t step);

 private:
  void record(std::string_view event);

  files::GrowingFile file_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_EVENTS_H_
