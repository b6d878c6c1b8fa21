#include "record/history.h"

#include <headroom/error.h>
#include <headroom/layers.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "files/file.h"

namespace headroom::internal {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostLooks = 400;
constexpr int64_t kMostElements = int64_t{1} << 48;  // of a tensor; sums of such counts still fit

// What is wrong with a line; becomes an Error with file and number.
struct BadLine {
  std::string why;
};

const ordered_json& member(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw BadLine{std::string("it has no \"") + key + "\""};
  return *found;
}

// Keys that others chose may hold any character, NUL among them.
double number_of(const ordered_json& value, const std::string& key) {
  if (value.is_number()) return value.get<double>();
  if (value == "inf") return HUGE_VAL;
  if (value == "-inf") return -HUGE_VAL;
  if (value == "nan") return std::nan("");
  throw BadLine{"its \"" + key + "\" is no number"};
}

double number(const ordered_json& object, const char* key) {
  return number_of(member(object, key), key);
}

int64_t integer(const ordered_json& value, const char* key) {
  const bool fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!fits) throw BadLine{std::string("its \"") + key + "\" is no whole number"};
  return value.get<int64_t>();
}

int64_t count(const ordered_json& value, const char* key) {
  const int64_t number = integer(value, key);
  if (number < 0 || number > kMostElements) {
    throw BadLine{std::string("its \"") + key + "\" cannot be"};
  }
  return number;
}

int64_t count_at(const ordered_json& object, const char* key) {
  return count(member(object, key), key);
}

std::string text_of(const ordered_json& value, const std::string& key) {
  if (!value.is_string()) throw BadLine{"its \"" + key + "\" is no text"};
  return value.get<std::string>();
}

std::string text(const ordered_json& object, const char* key) {
  return text_of(member(object, key), key);
}

HistoryLayer read_layer(const ordered_json& object) {
  HistoryLayer layer;
  layer.count = count_at(object, "count");
  layer.zeros = count_at(object, "zeros");
  layer.not_finite = count_at(object, "inf") + count_at(object, "nan");
  layer.amax = number(object, "amax");
  const int64_t from = integer(member(object, "from"), "from");
  const ordered_json& histogram = member(object, "histogram");
  const bool fits = histogram.is_array() && from >= GradDetail::kMinExponent &&
                    from <= GradDetail::kMaxExponent + 1 &&
                    from + static_cast<int64_t>(histogram.size()) <= GradDetail::kMaxExponent + 1;
  if (!fits) throw BadLine{"its \"histogram\" is none"};
  layer.from = static_cast<int>(from);
  for (const ordered_json& bin : histogram) layer.histogram.push_back(count(bin, "histogram"));
  return layer;
}

// The stats that fp16_zones() needs, back from the line.
Fp16Zones zones_of(const HistoryLayer& layer) {
  LayerStats stats;
  stats.stats.inf_count = layer.not_finite;
  stats.detail.zeros = layer.zeros;
  std::copy(layer.histogram.begin(), layer.histogram.end(),
            stats.detail.histogram.begin() + (layer.from - GradDetail::kMinExponent));
  return fp16_zones(stats);
}

void widen(const HistoryLayer& layer, LayerExtremes* extremes) {
  const Fp16Zones zones = zones_of(layer);
  extremes->lost = std::max(extremes->lost, zones.lost_share());
  extremes->subnormal = std::max(extremes->subnormal, zones.subnormal_share());
  if (layer.count > 0) {
    const double zeros = static_cast<double>(layer.zeros) / static_cast<double>(layer.count);
    extremes->zeros = std::max(extremes->zeros, zeros);
  }
}

}  // namespace

ordered_json number_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0.0 ? "inf" : "-inf";
  return value;
}

std::string beyond_limits(std::string_view line) {
  if (line.size() > kLongestLine) return "is longer than 64 MiB";
  std::array<size_t, kDeepest + 1> keys{};  // of the object at each depth
  size_t depth = 0;
  size_t values = 0;
  bool in_text = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_text) {
      if (c == '\\') ++i;
      in_text = c != '"';
      continue;
    }
    switch (c) {
      case '"':
        in_text = true;
        break;
      case '{':
      case '[':
        if (depth == kDeepest) return "has more than 16 lists and objects inside each other";
        keys[++depth] = 0;
        ++values;
        break;
      case '}':
      case ']':
        depth -= depth > 0;
        break;
      case ':':
        if (++keys[depth] > kMostKeys) return "has an object of more than 4096 entries";
        break;
      case ',':
        ++values;
        break;
      default:
        break;
    }
  }
  return values > kMostValues ? "has more than 4194304 values" : "";
}

HistoryReader::HistoryReader(std::string path, int64_t until)
    : path_(std::move(path)), until_(until) {}

bool HistoryReader::read_more() {
  const int64_t before = lines_;
  const files::File file(path_);
  const bool rewound = !continues(file);
  if (rewound) {
    const int64_t ever = lines_ever();
    *this = HistoryReader(path_, until_);
    lines_before_ = ever + 1;
  }
  if (!damage_.empty()) throw Error(ErrorCode::kBadState, damage_);
  std::vector<char> buffer(1 << 20);
  while (!stopped_) {
    const size_t got = file.read_some(static_cast<uint64_t>(offset_), buffer.data(), buffer.size());
    if (got == 0) break;
    std::string_view bytes(buffer.data(), got);
    offset_ += static_cast<int64_t>(got);
    tail_ =
        (tail_ + std::string(bytes)).substr(std::max(kTail, tail_.size() + bytes.size()) - kTail);
    for (size_t end; !stopped_ && (end = bytes.find('\n')) != std::string_view::npos;) {
      rest_ += bytes.substr(0, end);
      bytes.remove_prefix(end + 1);
      take(rest_);
      if (!stopped_) bytes_ += static_cast<int64_t>(rest_.size()) + 1;
      rest_.clear();
    }
    rest_ += bytes;
    if (rest_.size() > kLongestLine) take(rest_);  // which refuses it: its end is not waited for
  }
  return rewound || lines_ > before;
}

// A run that was rewound has something else where the reading ended: no two lines have the same
// time.
bool HistoryReader::continues(const files::File& file) const {
  std::string now(tail_.size(), '\0');
  file.read_some(static_cast<uint64_t>(offset_) - now.size(), now.data(), now.size());
  return now == tail_;
}

bool HistoryReader::is_later(const ordered_json& line) const {
  return until_ != kAll && (line.contains("end") || integer(member(line, "step"), "step") > until_);
}

void HistoryReader::take(std::string_view content) {
  ++lines_;
  try {
    const std::string beyond = beyond_limits(content);
    if (!beyond.empty()) throw BadLine{"it " + beyond};
    const ordered_json line = ordered_json::parse(content, nullptr, false);
    if (!line.is_object()) throw BadLine{"it is no JSON object"};
    if (lines_ == 1) {
      take_header(line);
    } else if (is_later(line)) {
      stopped_ = true;
    } else if (!history_.end.empty()) {
      throw BadLine{"it comes after the end of the run"};
    } else if (line.contains("end")) {
      take_end(line);
    } else if (line.contains("layers")) {
      take_look(line);
    } else if (line.contains("settings")) {
      take_settings(line);
    } else if (line.contains("note")) {
      take_note(line);
    } else {
      take_step(line);
    }
  } catch (const BadLine& bad) {
    damage_ = path_ + ":" + std::to_string(lines_) +
              ": this line of the history is damaged: " + bad.why + ".";
    throw Error(ErrorCode::kBadState, damage_);
  }
}

void HistoryReader::take_header(const ordered_json& line) {
  const auto has = [&](const char* key, const ordered_json& value) {
    const auto found = line.find(key);  // not value(), which copies what may be deep
    return found != line.end() && *found == value;
  };
  if (!has("format", kHistoryFormat)) {
    throw BadLine{std::string("it does not say \"format\": \"") + kHistoryFormat + "\""};
  }
  if (!has("version", kHistoryVersion)) {
    throw BadLine{"its version is not " + std::to_string(kHistoryVersion) +
                  ", the one this program reads"};
  }
  history_.name = text(line, "name");
  history_.group = text(line, "group");
  history_.started = text(line, "started");
  take_settings(line);
}

void HistoryReader::take_settings(const ordered_json& line) {
  const ordered_json& settings = member(line, "settings");
  if (!settings.is_object()) throw BadLine{"its \"settings\" are none"};
  history_.settings.clear();
  for (const auto& item : settings.items()) {
    history_.settings.emplace_back(item.key(), text_of(item.value(), item.key()));
  }
}

void HistoryReader::take_step(const ordered_json& line) {
  HistoryStep step;
  step.step = integer(member(line, "step"), "step");
  if (!history_.steps.empty() && step.step <= history_.steps.back().step) {
    throw BadLine{"its step is not after the one before"};
  }
  step.loss = number(line, "loss");
  step.scale = number(line, "scale");
  step.grad_norm = number(line, "grad_norm");
  step.seconds = number(line, "seconds");
  const ordered_json& overflow = member(line, "overflow");
  if (!overflow.is_boolean()) throw BadLine{"its \"overflow\" is neither true nor false"};
  step.applied = !overflow.get<bool>();
  if (!step.applied) step.culprit = text(line, "culprit");
  history_.skipped += !step.applied;
  history_.steps.push_back(std::move(step));
}

void HistoryReader::take_look(const ordered_json& line) {
  HistoryLook look;
  look.step = integer(member(line, "step"), "step");
  if (!history_.looks.empty() && look.step <= history_.looks.back().step) {
    throw BadLine{"its step is not after the one before"};
  }
  look.scale = number(line, "scale");
  if (line.contains("first_to_overflow")) {
    look.first_to_overflow = text(line, "first_to_overflow");
    look.doublings_left = number(line, "doublings_left");
  }
  if (line.contains("first_to_underflow")) {
    look.first_to_underflow = text(line, "first_to_underflow");
    look.lost = number(line, "lost");
    look.subnormal = number(line, "subnormal");
  }
  const ordered_json& layers = member(line, "layers");
  if (!layers.is_array()) throw BadLine{"its \"layers\" are no list"};
  for (const ordered_json& object : layers) {
    if (!object.is_object()) throw BadLine{"one of its \"layers\" is none"};
    const HistoryLayer layer = read_layer(object);
    const std::string name = text(object, "name");
    widen(layer, &history_.extremes[name]);
    look.layers[name] = layer;
  }
  // The last look makes room for this one unless it is one of those to keep.
  if (looks_seen_ > 0 && (looks_seen_ - 1) % keep_every_ != 0) history_.looks.pop_back();
  history_.looks.push_back(std::move(look));
  ++looks_seen_;
  if (history_.looks.size() <= kMostLooks) return;
  std::vector<HistoryLook> kept;
  for (size_t i = 0; i < history_.looks.size(); i += 2) {
    kept.push_back(std::move(history_.looks[i]));
  }
  history_.looks = std::move(kept);
  keep_every_ *= 2;
}

void HistoryReader::take_note(const ordered_json& line) {
  history_.notes.push_back({integer(member(line, "step"), "step"), text(line, "note")});
}

void HistoryReader::take_end(const ordered_json& line) {
  history_.end = text(line, "end");
  if (history_.end.empty()) throw BadLine{"its \"end\" is empty"};
  const ordered_json& results = member(line, "results");
  if (!results.is_object()) throw BadLine{"its \"results\" are none"};
  for (const auto& item : results.items()) {
    history_.results.emplace_back(item.key(), number_of(item.value(), item.key()));
  }
}

}  // namespace headroom::internal
