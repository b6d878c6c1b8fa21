#include "record/events.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>

#include "files/file.h"
#include "record/text.h"

namespace headroom::internal {
namespace {

// One step of the CRC for every byte. The polynomial 0x1EDC6F41, bit-reversed.
constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

// An unsigned integer as bytes, independent of the machine.
template <typename T>
std::string little_endian(T value) {
  std::string bytes(sizeof(T), '\0');
  for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<char>(value >> (8 * i) & 0xFF);
  return bytes;
}

// TFRecord rotates a CRC and adds a constant, because a CRC over data that contains CRCs is weak.
std::string masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return little_endian(static_cast<uint32_t>((crc >> 15 | crc << 17) + 0xA282EAD8u));
}

// Protocol buffers: a field is a key (its number and wire type), followed by the value.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Base 128, low groups first; the high bit marks that more bytes follow.
std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

std::string key(uint32_t field, Wire wire) { return varint(field << 3 | wire); }

std::string bytes_field(uint32_t field, std::string_view value) {
  return key(field, kBytes) + varint(value.size()) + std::string(value);
}

std::string fixed64(double value) { return little_endian(std::bit_cast<uint64_t>(value)); }

std::string double_field(uint32_t field, double value) {
  return key(field, kFixed64) + fixed64(value);
}

// Field numbers of TensorFlow's event.proto and summary.proto.
namespace event {
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5;
}  // namespace event
namespace value {
constexpr uint32_t kTag = 1, kSimpleValue = 2, kHistogram = 5, kMetadata = 9;
}  // namespace value
namespace metadata {
constexpr uint32_t kPlugin = 1, kPluginName = 1, kPluginContent = 2;
}  // namespace metadata
namespace histogram {
constexpr uint32_t kMin = 1, kMax = 2, kCount = 3, kSum = 4, kSquares = 5, kLimits = 6, kCounts = 7;
}  // namespace histogram
constexpr uint32_t kSummaryValue = 1;

// Field numbers of plugin_data.proto of TensorBoard's HParams plugin, and of struct.proto.
namespace hparams {
constexpr uint32_t kSessionStart = 3, kSessionEnd = 4;                     // HParamsPluginData
constexpr uint32_t kParameters = 1, kStartTime = 5;                        // SessionStartInfo
constexpr uint32_t kStatus = 1, kEndTime = 2, kSuccess = 1, kFailure = 2;  // SessionEndInfo
constexpr uint32_t kMapKey = 1, kMapValue = 2, kNumber = 2, kText = 3;
}  // namespace hparams

// A record: length, CRC of the length, event, CRC of the event.
constexpr size_t kCrcBytes = 4;
constexpr size_t kRecordStart = sizeof(uint64_t) + kCrcBytes;

// No line within the limits of a history results in a longer record.
constexpr uint64_t kLongestRecord = uint64_t{256} << 20;

// Reads the record at offset `from`. Returns false if there is no complete, undamaged record.
bool read_record(const files::File& file, uint64_t from, std::string* event) {
  uint64_t length = 0;
  if (!file.holds(from, kRecordStart + kCrcBytes)) return false;
  file.read(from, &length, sizeof(length));
  if (length > kLongestRecord || !file.holds(from, kRecordStart + length + kCrcBytes)) return false;
  *event = file.read_text(from + kRecordStart, length);
  return file.read_text(from + kRecordStart + length, kCrcBytes) == masked_crc(*event);
}

// The step of an event written by add(): the time (a key byte and a double), then the step. The
// header and summaries of no particular step have none; kNoStep is returned for them.
constexpr int64_t kNoStep = std::numeric_limits<int64_t>::min() + 1;
int64_t step_of(std::string_view event) {
  event.remove_prefix(std::min(event.size(), 1 + sizeof(double)));
  if (event.empty() || event[0] != key(event::kStep, kVarint)[0]) return kNoStep;
  uint64_t step = 0;
  for (size_t i = 1; i < std::min<size_t>(event.size(), 11); ++i) {
    step |= static_cast<uint64_t>(event[i] & 0x7F) << (7 * (i - 1));
    if ((event[i] & 0x80) == 0) break;
  }
  return static_cast<int64_t>(step);
}

// Seconds since 1970, as TensorBoard expects.
double now() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// A value of the HParams plugin: no value of its own, only metadata.
std::string hparams_value(std::string_view tag, uint32_t field, std::string_view message) {
  const std::string plugin = bytes_field(metadata::kPluginName, "hparams") +
                             bytes_field(metadata::kPluginContent, bytes_field(field, message));
  return bytes_field(kSummaryValue,
                     bytes_field(value::kTag, tag) +
                         bytes_field(value::kMetadata, bytes_field(metadata::kPlugin, plugin)));
}

// A google.protobuf.Value: a number if the whole text is one.
std::string setting_value(const std::string& text) {
  double number = 0.0;
  const char* const end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, number);
  // Not "inf" and "nan", which the plugin cannot show as numbers.
  const bool numeric = error == std::errc() && parsed == end && std::isfinite(number);
  return numeric ? double_field(hparams::kNumber, number)
                 : bytes_field(hparams::kText, valid_utf8(text));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) {
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<uint8_t>(byte)) & 0xFF];
  }
  return ~crc;
}

void Summary::scalar(std::string_view tag, double number) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(number));
  bytes_ +=
      bytes_field(kSummaryValue, bytes_field(value::kTag, valid_utf8(tag)) +
                                     key(value::kSimpleValue, kFixed32) + little_endian(bits));
}

std::pair<size_t, size_t> nonempty_bins(const GradDetail& detail) {
  const auto& bins = detail.histogram;
  size_t first = 0, end = bins.size();
  while (end > 0 && bins[end - 1] == 0) --end;
  while (first < end && bins[first] == 0) ++first;
  return {first, end};
}

void Summary::log2_histogram(std::string_view tag, const GradDetail& detail) {
  const auto [first, end] = nonempty_bins(detail);
  if (first == end) return;
  const double low = GradDetail::kMinExponent + static_cast<double>(first);
  // A bucket begins where the previous one ends, so an empty one comes first. The message also has
  // sums of the values, for which each element counts as the centre of its bucket.
  std::string limits = fixed64(low), counts = fixed64(0.0);
  double total = 0.0, sum = 0.0, squares = 0.0;
  for (size_t i = first; i < end; ++i) {
    const auto count = static_cast<double>(detail.histogram[i]);
    const double from = GradDetail::kMinExponent + static_cast<double>(i);
    limits += fixed64(from + 1.0);
    counts += fixed64(count);
    total += count;
    sum += count * (from + 0.5);
    squares += count * (from + 0.5) * (from + 0.5);
  }
  const double high = GradDetail::kMinExponent + static_cast<double>(end);
  const std::string message =
      double_field(histogram::kMin, low) + double_field(histogram::kMax, high) +
      double_field(histogram::kCount, total) + double_field(histogram::kSum, sum) +
      double_field(histogram::kSquares, squares) + bytes_field(histogram::kLimits, limits) +
      bytes_field(histogram::kCounts, counts);
  bytes_ += bytes_field(kSummaryValue, bytes_field(value::kTag, valid_utf8(tag)) +
                                           bytes_field(value::kHistogram, message));
}

void Summary::session_start(const std::vector<std::pair<std::string, std::string>>& settings) {
  std::string message;
  for (const auto& [name, text] : settings) {
    message +=
        bytes_field(hparams::kParameters, bytes_field(hparams::kMapKey, valid_utf8(name)) +
                                              bytes_field(hparams::kMapValue, setting_value(text)));
  }
  message += double_field(hparams::kStartTime, now());
  bytes_ += hparams_value("_hparams_/session_start_info", hparams::kSessionStart, message);
}

void Summary::session_end(bool success) {
  const std::string message = key(hparams::kStatus, kVarint) +
                              varint(success ? hparams::kSuccess : hparams::kFailure) +
                              double_field(hparams::kEndTime, now());
  bytes_ += hparams_value("_hparams_/session_end_info", hparams::kSessionEnd, message);
}

bool EventFile::rewind(int64_t step) {
  const files::File file(file_.path());
  uint64_t kept = 0;
  for (std::string event; read_record(file, kept, &event);) {
    if (step_of(event) > step) break;
    kept += kRecordStart + event.size() + kCrcBytes;
  }
  file_.cut(static_cast<int64_t>(kept));
  if (kept > 0) return false;
  record(double_field(event::kWallTime, now()) + bytes_field(event::kFileVersion, "brain.Event:2"));
  return true;
}

void EventFile::add(const Summary& summary) {
  record(double_field(event::kWallTime, now()) + bytes_field(event::kSummary, summary.bytes()));
}

void EventFile::add(int64_t step, const Summary& summary) {
  if (summary.bytes().empty()) return;
  record(double_field(event::kWallTime, now()) + key(event::kStep, kVarint) +
         varint(static_cast<uint64_t>(step)) + bytes_field(event::kSummary, summary.bytes()));
}

// Appends one record; see GrowingFile::add() for what happens on a full disk.
void EventFile::record(std::string_view event) {
  const std::string length = little_endian(static_cast<uint64_t>(event.size()));
  file_.add(length + masked_crc(length) + std::string(event) + masked_crc(event));
}

}  // namespace headroom::internal
