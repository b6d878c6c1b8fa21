#include "record/history.h"

#include <headroom/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "files/file.h"

namespace headroom::internal {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostSnapshots = 400;                 // kept in memory
constexpr uint64_t kMostElements = uint64_t{1} << 48;  // per tensor; sums still fit in int64_t

// The error in a line, as the end of a sentence about "it". Becomes an Error with file and line.
struct BadLine {
  std::string why;
};

// Accessors that throw BadLine if a member is missing or of the wrong type.
const ordered_json& member(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw BadLine{std::string("it has no \"") + key + "\""};
  return *found;
}

// Keys chosen by the user may contain any character, including NUL.
double number_of(const ordered_json& value, const std::string& key) {
  if (value.is_number()) return value.get<double>();
  if (value == "inf") return HUGE_VAL;
  if (value == "-inf") return -HUGE_VAL;
  if (value == "nan") return std::nan("");
  throw BadLine{"its \"" + key + "\" is not a number"};
}

double number(const ordered_json& object, const char* key) {
  return number_of(member(object, key), key);
}

int64_t integer(const ordered_json& object, const char* key) {
  const ordered_json& value = member(object, key);
  const bool fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!fits) throw BadLine{std::string("its \"") + key + "\" is not an integer"};
  return value.get<int64_t>();
}

int64_t count_of(const ordered_json& value, const char* key) {
  const bool valid = value.is_number_unsigned() && value.get<uint64_t>() <= kMostElements;
  if (!valid) throw BadLine{std::string("its \"") + key + "\" is not a number of elements"};
  return value.get<int64_t>();
}

int64_t count(const ordered_json& object, const char* key) {
  return count_of(member(object, key), key);
}

std::string text_of(const ordered_json& value, const std::string& key) {
  if (!value.is_string()) throw BadLine{"its \"" + key + "\" is not a string"};
  return value.get<std::string>();
}

std::string text(const ordered_json& object, const char* key) {
  return text_of(member(object, key), key);
}

// A loss scale: 0, negative, NaN and inf cannot be reached.
double scale_of(const ordered_json& object) {
  const double scale = number(object, "scale");
  if (!(scale > 0.0) || !std::isfinite(scale)) {
    throw BadLine{"its \"scale\" is not a positive number"};
  }
  return scale;
}

// The step of a line, which must be above that of the previous line of the same kind.
template <typename Lines>
int64_t next_step(const ordered_json& line, const Lines& previous) {
  const int64_t step = integer(line, "step");
  if (!previous.empty() && step <= previous.back().step) {
    throw BadLine{"its step is not after the previous one"};
  }
  return step;
}

// One entry of "layers". The histogram must lie within GradDetail's exponents.
HistoryLayer layer_of(const ordered_json& object) {
  if (!object.is_object()) throw BadLine{"one of its \"layers\" is not an object"};
  HistoryLayer layer;
  layer.count = count(object, "count");
  layer.zeros = count(object, "zeros");
  layer.not_finite = count(object, "inf") + count(object, "nan");
  layer.amax = number(object, "amax");
  const int64_t from = integer(object, "from");
  const ordered_json& histogram = member(object, "histogram");
  const bool fits = histogram.is_array() && from >= GradDetail::kMinExponent &&
                    from <= GradDetail::kMaxExponent + 1 &&
                    from + static_cast<int64_t>(histogram.size()) <= GradDetail::kMaxExponent + 1;
  if (!fits) throw BadLine{"its \"histogram\" is invalid"};
  layer.from = static_cast<int>(from);
  for (const ordered_json& bin : histogram) layer.histogram.push_back(count_of(bin, "histogram"));
  return layer;
}

// Whether a skipped step had inf or nan; neither in histories of older versions.
void read_not_finite(const ordered_json& line, HistoryStep* step) {
  step->has_inf = line.contains("inf") && count(line, "inf") > 0;
  step->has_nan = line.contains("nan") && count(line, "nan") > 0;
}

// A step of an attempt that was dropped.
HistoryStep dropped_step(const ordered_json& object) {
  if (!object.is_object()) throw BadLine{"one of its \"dropped\" is not an object"};
  HistoryStep step;
  step.applied = false;
  step.step = integer(object, "step");
  step.loss = number(object, "loss");
  step.scale = scale_of(object);
  read_not_finite(object, &step);
  return step;
}

// Raises the extremes of a tensor to those of a snapshot.
void update_extremes(const FloatRange& range, const HistoryLayer& layer, LayerExtremes* extremes) {
  const Fp16Zones zones = zones_in(range, stats_of("", layer));
  extremes->lost = std::max(extremes->lost, zones.lost_share());
  extremes->subnormal = std::max(extremes->subnormal, zones.subnormal_share());
  if (layer.count > 0) {
    const double zeros = static_cast<double>(layer.zeros) / static_cast<double>(layer.count);
    extremes->zeros = std::max(extremes->zeros, zeros);
  }
}

}  // namespace

bool is_bad_batch(const HistoryStep& step) {
  return !step.applied && (!std::isfinite(step.loss) || (step.has_nan && !step.has_inf));
}

LayerStats stats_of(const std::string& name, const HistoryLayer& layer) {
  LayerStats stats;
  stats.name = name;
  stats.stats.count = layer.count;
  stats.stats.inf_count = layer.not_finite;
  stats.stats.amax = layer.amax;
  stats.detail.zeros = layer.zeros;
  std::copy(layer.histogram.begin(), layer.histogram.end(),
            stats.detail.histogram.begin() + (layer.from - GradDetail::kMinExponent));
  return stats;
}

Fp16Zones zones_of(const HistoryLayer& layer) { return fp16_zones(stats_of("", layer)); }

ordered_json number_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0.0 ? "inf" : "-inf";
  return value;
}

std::string exceeded_limit(std::string_view line) {
  if (line.size() > kLongestLine) return "is longer than 64 MiB";
  std::array<size_t, kDeepest + 1> keys{};  // in the object at each depth
  size_t depth = 0;
  size_t values = 0;
  bool in_text = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_text) {
      if (c == '\\') ++i;  // skip the escaped character
      in_text = c != '"';
      continue;
    }
    switch (c) {
      case '"':
        in_text = true;
        break;
      case '{':
      case '[':
        if (depth == kDeepest) return "has more than 16 nested arrays and objects";
        keys[++depth] = 0;
        ++values;
        break;
      case '}':
      case ']':
        depth -= depth > 0;
        break;
      case ':':
        // Outside of strings, every colon follows a key.
        if (++keys[depth] > kMostKeys) return "has an object of more than 4096 entries";
        break;
      case ',':  // every value but the first of an array or object follows a comma
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
  const int64_t before = lines();
  const files::File file(path_);
  if (was_rewound(file)) {
    *this = HistoryReader(path_, until_);
    lines_before_ = before + 1;
  }
  // A damaged history stays damaged: later lines cannot be interpreted without the bad one.
  if (!damage_.empty()) throw Error(ErrorCode::kBadState, damage_);
  std::vector<char> buffer(1 << 20);
  while (!stopped_) {
    const size_t got = file.read_some(static_cast<uint64_t>(offset_), buffer.data(), buffer.size());
    if (got == 0) break;
    std::string_view bytes(buffer.data(), got);
    offset_ += static_cast<int64_t>(got);
    // Remember the end of what was read, to recognise a rewind.
    tail_ += bytes;
    tail_.erase(0, tail_.size() - std::min(tail_.size(), kTail));
    for (size_t end; !stopped_ && (end = bytes.find('\n')) != std::string_view::npos;) {
      rest_ += bytes.substr(0, end);
      bytes.remove_prefix(end + 1);
      read_line(rest_);
      if (!stopped_) bytes_ += static_cast<int64_t>(rest_.size()) + 1;
      rest_.clear();
    }
    rest_ += bytes;
    if (rest_.size() > kLongestLine) read_line(rest_);  // throws; do not wait for the line's end
  }
  return lines() > before;
}

// A rewound run has other bytes before offset_, because every line of steps has its own time.
bool HistoryReader::was_rewound(const files::File& file) const {
  std::string now(tail_.size(), '\0');
  file.read_some(static_cast<uint64_t>(offset_) - now.size(), now.data(), now.size());
  return now != tail_;
}

// Whether reading stops before this line, see the constructor.
bool HistoryReader::is_later(const ordered_json& line) const {
  return until_ != kAll && (line.contains("end") || integer(line, "step") > until_);
}

// Dispatches a line by the key that identifies its kind.
void HistoryReader::read_line(std::string_view content) {
  ++lines_;
  try {
    const std::string exceeded = exceeded_limit(content);
    if (!exceeded.empty()) throw BadLine{"it " + exceeded};
    const ordered_json line = ordered_json::parse(content, nullptr, false);
    if (!line.is_object()) throw BadLine{"it is not a JSON object"};
    if (lines_ == 1) {
      read_header(line);
    } else if (is_later(line)) {
      stopped_ = true;
    } else if (!history_.end.empty()) {
      throw BadLine{"it comes after the end of the run"};
    } else if (line.contains("end")) {
      read_end(line);
    } else if (line.contains("layers")) {
      read_snapshot(line);
    } else if (line.contains("settings")) {
      read_settings(line);
    } else if (line.contains("note")) {
      read_note(line);
    } else {
      read_step(line);
    }
  } catch (const BadLine& bad) {
    damage_ = path_ + ":" + std::to_string(lines_) +
              ": this line of the history is damaged: " + bad.why + ".";
    throw Error(ErrorCode::kBadState, damage_);
  }
}

// The first line identifies the format and its version.
void HistoryReader::read_header(const ordered_json& line) {
  const auto has = [&](const char* key, const ordered_json& value) {
    const auto found = line.find(key);  // unlike value(), makes no copy of untrusted data
    return found != line.end() && *found == value;
  };
  if (!has("format", kHistoryFormat)) {
    throw BadLine{std::string("its \"format\" is not \"") + kHistoryFormat + "\""};
  }
  if (!has("version", kHistoryVersion)) {
    throw BadLine{"its version is not " + std::to_string(kHistoryVersion) +
                  ", which this program reads"};
  }
  history_.name = text(line, "name");
  history_.group = text(line, "group");
  history_.started = text(line, "started");
  read_policy(line);
  read_settings(line);
}

// Reads what it can: a policy of another version is no damage.
void HistoryReader::read_policy(const ordered_json& line) {
  const auto policy = line.find("policy");
  if (policy == line.end() || !policy->is_object()) return;
  const auto number = [&](const char* key, double* value) {
    const auto found = policy->find(key);
    if (found != policy->end() && found->is_number()) *value = found->get<double>();
  };
  const auto rule = policy->find("rule");
  if (rule != policy->end() && rule->is_string()) history_.policy.rule = rule->get<std::string>();
  number("min_scale", &history_.policy.min_scale);
  number("max_scale", &history_.policy.max_scale);
  number("growth_interval", &history_.policy.growth_interval);
  number("hysteresis", &history_.policy.hysteresis);
}

void HistoryReader::read_note(const ordered_json& line) {
  history_.notes.push_back({integer(line, "step"), text(line, "note")});
  const auto dropped = line.find("dropped");
  if (dropped == line.end()) return;
  if (!dropped->is_array()) throw BadLine{"its \"dropped\" is not an array"};
  DroppedAttempt& attempt = history_.dropped.emplace_back();
  attempt.from = integer(line, "step");
  attempt.reached = integer(line, "reached");
  for (const ordered_json& step : *dropped) attempt.bad_batches.push_back(dropped_step(step));
}

// From the header, or from a line that a resumed run wrote because its settings had changed.
void HistoryReader::read_settings(const ordered_json& line) {
  const ordered_json& settings = member(line, "settings");
  if (!settings.is_object()) throw BadLine{"its \"settings\" are not an object"};
  history_.settings.clear();
  history_.settings_from = history_.steps.size();
  for (const auto& item : settings.items()) {
    history_.settings.emplace_back(item.key(), text_of(item.value(), item.key()));
  }
}

void HistoryReader::read_step(const ordered_json& line) {
  HistoryStep step;
  step.step = next_step(line, history_.steps);
  step.loss = number(line, "loss");
  step.scale = scale_of(line);
  step.grad_norm = number(line, "grad_norm");
  step.seconds = number(line, "seconds");
  const ordered_json& overflow = member(line, "overflow");
  if (!overflow.is_boolean()) throw BadLine{"its \"overflow\" is neither true nor false"};
  step.applied = !overflow.get<bool>();
  if (step.applied) {
    if (line.contains("amax")) step.amax = number(line, "amax");
  } else {
    step.culprit = text(line, "culprit");
    read_not_finite(line, &step);
  }
  history_.skipped += !step.applied;
  history_.steps.push_back(std::move(step));
}

void HistoryReader::read_snapshot(const ordered_json& line) {
  LayerSnapshot snapshot;
  snapshot.step = next_step(line, history_.snapshots);
  snapshot.scale = number(line, "scale");
  if (line.contains("first_to_overflow")) {
    snapshot.first_to_overflow = text(line, "first_to_overflow");
    snapshot.doublings_left = number(line, "doublings_left");
  }
  if (line.contains("first_to_underflow")) {
    snapshot.first_to_underflow = text(line, "first_to_underflow");
    snapshot.lost = number(line, "lost");
    snapshot.subnormal = number(line, "subnormal");
  }
  const ordered_json& layers = member(line, "layers");
  if (!layers.is_array()) throw BadLine{"its \"layers\" are not an array"};
  const FloatRange& range = range_of(history_.settings);
  for (const ordered_json& object : layers) {
    HistoryLayer layer = layer_of(object);
    const std::string name = text(object, "name");
    update_extremes(range, layer, &history_.extremes[name]);
    snapshot.layers[name] = std::move(layer);
  }
  keep_snapshot(std::move(snapshot));
}

// Keeps every keep_every_-th snapshot and the last one. When there are too many, every second one
// is dropped and the interval doubles.
void HistoryReader::keep_snapshot(LayerSnapshot snapshot) {
  std::vector<LayerSnapshot>& kept = history_.snapshots;
  // The previous snapshot was only kept because it was the last, unless its turn had come.
  if (snapshots_seen_ > 0 && (snapshots_seen_ - 1) % keep_every_ != 0) kept.pop_back();
  kept.push_back(std::move(snapshot));
  ++snapshots_seen_;
  if (kept.size() <= kMostSnapshots) return;
  for (size_t i = 1; 2 * i < kept.size(); ++i) kept[i] = std::move(kept[2 * i]);
  kept.resize((kept.size() + 1) / 2);
  keep_every_ *= 2;
}

void HistoryReader::read_end(const ordered_json& line) {
  history_.end = text(line, "end");
  if (history_.end.empty()) throw BadLine{"its \"end\" is empty"};
  const ordered_json& results = member(line, "results");
  if (!results.is_object()) throw BadLine{"its \"results\" are not an object"};
  for (const auto& item : results.items()) {
    history_.results.emplace_back(item.key(), number_of(item.value(), item.key()));
  }
}

}  // namespace headroom::internal
