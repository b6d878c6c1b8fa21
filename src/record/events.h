#ifndef HEADROOM_SRC_RECORD_EVENTS_H_
#define HEADROOM_SRC_RECORD_EVENTS_H_

#include <headroom/measure.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/write.h"

namespace headroom::internal {

/// CRC-32C (Castagnoli), as TFRecord uses it.
uint32_t crc32c(std::string_view bytes);

/// One step's summary in TensorBoard's terms.
class Summary {
 public:
  void scalar(std::string_view tag, double value);

  /// The log2 of the magnitudes, as counted by measure(): TensorBoard's axis is linear, on which
  /// the magnitudes themselves would all lie at 0. Nothing is added if there are none.
  void log2_histogram(std::string_view tag, const GradDetail& detail);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;  // a Summary message
};

/// An event file: TFRecords of Event messages.
class EventFile {
 public:
  explicit EventFile(const std::string& path);  // what is there already stays
  void add(int64_t step, const Summary& summary);

  /// Drops all events after `step`, and all after the first one that is damaged; starts the file if
  /// nothing is left.
  void rewind(int64_t step);

 private:
  void record(std::string_view event);

  files::GrowingFile file_;
};

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_EVENTS_H_
