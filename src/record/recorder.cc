#include <headroom/record.h>
#include <headroom/version.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "core/check.h"
#include "files/write.h"
#include "record/events.h"
#include "record/history.h"

namespace headroom {
namespace {

using nlohmann::ordered_json;

// Every character that is not UTF-8, in a tensor's name for example, becomes U+FFFD. A line that no
// reader would take is refused before anything of it is written.
std::string line_of(const ordered_json& object) {
  std::string line = object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  const std::string beyond = internal::beyond_limits(line);
  internal::require(beyond.empty(), ErrorCode::kInvalidArgument, [&] {
    return "A line for the history " + beyond +
           ", which no reader takes; record fewer tensors or numbers.";
  });
  line += '\n';
  return line;
}

ordered_json scalars_json(const Scalars& scalars) {
  ordered_json object = ordered_json::object();
  for (const auto& [name, value] : scalars) object[name] = internal::number_json(value);
  return object;
}

ordered_json settings_json(const std::vector<std::pair<std::string, std::string>>& settings) {
  ordered_json object = ordered_json::object();
  for (const auto& [key, value] : settings) object[key] = value;
  return object;
}

// With milliseconds, by which a report orders short runs.
std::string utc_time() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[64];
  const size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof text - length, ".%03dZ",
                static_cast<int>(since.count() % 1000));
  return text;
}

// The policy as GradScaler::save() writes it.
ordered_json policy_json(const ScalePolicy& policy) {
  return ordered_json::parse(GradScaler(policy).save())["policy"];
}

// The largest gradient, whether or not it is still scaled in memory.
double unscaled_amax(const StepReport& report) {
  const double norm = report.stats.norm();
  return norm > 0.0 ? report.stats.amax * (report.grad_norm / norm) : report.stats.amax;
}

ordered_json layer_json(const LayerStats& layer) {
  const GradStats& stats = layer.stats;
  const auto& histogram = layer.detail.histogram;
  int first = 0;
  int end = GradDetail::kBins;
  while (first < end && histogram[static_cast<size_t>(first)] == 0) ++first;
  while (end > first && histogram[static_cast<size_t>(end) - 1] == 0) --end;
  if (first == end) first = end = 0;
  ordered_json object = {{"name", layer.name},
                         {"count", stats.count},
                         {"zeros", layer.detail.zeros},
                         {"subnormals", layer.detail.subnormals},
                         {"inf", stats.inf_count},
                         {"nan", stats.nan_count},
                         {"amax", internal::number_json(stats.amax)}};
  object["from"] = GradDetail::kMinExponent + first;
  object["histogram"] = std::vector<int64_t>(histogram.begin() + first, histogram.begin() + end);
  return object;
}

ordered_json bounds_json(const std::vector<LayerStats>& layers) {
  const ScaleBounds bounds = scale_bounds(layers);
  ordered_json object = ordered_json::object();
  const auto name = [&](int64_t index) { return layers[static_cast<size_t>(index)].name; };
  if (bounds.first_to_overflow >= 0) {
    object["first_to_overflow"] = name(bounds.first_to_overflow);
    object["doublings_left"] = internal::number_json(bounds.doublings_left);
  }
  if (bounds.first_to_underflow >= 0) {
    object["first_to_underflow"] = name(bounds.first_to_underflow);
    object["lost"] = bounds.lost;
    object["subnormal"] = bounds.subnormal;
  }
  return object;
}

}  // namespace

struct Recorder::Files {
  explicit Files(const std::string& path) : history(path) {}

  files::GrowingFile history;
  std::vector<std::pair<std::string, std::string>> settings;
  std::optional<internal::EventFile> events;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  int64_t last_step = std::numeric_limits<int64_t>::min();
  int64_t last_look = std::numeric_limits<int64_t>::min();
  int64_t steps = 0;
  int64_t skipped = 0;
  double seconds = 0.0;  // at the last step
  bool finished = false;

  // Keeps what was written up to `until`, or up to a damaged line. False if nothing was there; what
  // cannot be read, or begins as no history does, is left alone. Where the settings are others now,
  // that is written down.
  bool keep(int64_t until, std::string* wrong) {
    internal::HistoryReader reader(history.path(), until);
    try {
      reader.read_more();
    } catch (const Error& error) {
      const bool damaged = error.code() == ErrorCode::kBadState;
      if (damaged && reader.bytes() == 0) {
        throw Error(ErrorCode::kBadState, std::string(error.what()) +
                                              " Nothing of it can be gone on with; move it away, "
                                              "or begin another run.");
      }
      if (!damaged) throw;
      *wrong = error.what();
    }
    history.cut(reader.bytes());
    const internal::History& kept = reader.history();
    constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
    last_step = kept.steps.empty() ? kNone : kept.steps.back().step;
    last_look = kept.looks.empty() ? kNone : kept.looks.back().step;
    steps = static_cast<int64_t>(kept.steps.size());
    skipped = kept.skipped;
    seconds = kept.steps.empty() ? 0.0 : kept.steps.back().seconds;
    start = std::chrono::steady_clock::now() -
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
    if (reader.bytes() == 0) return false;
    const ordered_json now = settings_json(settings);
    if (!now.empty() && line_of(now) != line_of(settings_json(kept.settings))) {
      history.add(line_of({{"step", std::max<int64_t>(last_step, 0)}, {"settings", now}}));
    }
    return true;
  }

  // To both files, or to none.
  void add(const ordered_json& line, int64_t step, const internal::Summary& summary) {
    const int64_t before = history.size();
    history.add(line_of(line));
    try {
      if (events.has_value()) events->add(step, summary);
    } catch (const Error&) {
      history.cut(before);
      throw;
    }
  }

  static void check_later(const char* call, int64_t step, int64_t last) {
    internal::require(step > last, ErrorCode::kInvalidArgument, [&] {
      return std::string(call) + " got step " + std::to_string(step) + " after step " +
             std::to_string(last) + "; steps have to grow.";
    });
  }
};

Recorder::Recorder(const std::string& folder, const RunInfo& info) {
  validate(info.policy);
  files::make_folders(folder);
  const std::filesystem::path place(folder);
  files_ = std::make_unique<Files>((place / internal::kHistoryFile).string());
  files_->settings = info.settings;
  constexpr int64_t kBeginning = std::numeric_limits<int64_t>::min();
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max() - 1;
  std::error_code ignored;
  std::string wrong;
  if (info.resume && files_->keep(kEnd, &wrong)) {
    if (!wrong.empty()) {
      note(std::max<int64_t>(files_->last_step, 0),
           "What came after this step is forgotten: " + wrong);
    }
  } else {
    files_->history.cut(0);
    std::string name = info.name;
    if (name.empty()) {
      name = std::filesystem::absolute(place / "x").parent_path().filename().string();
    }
    ordered_json header = {{"format", internal::kHistoryFormat},
                           {"version", internal::kHistoryVersion},
                           {"headroom", HEADROOM_VERSION},
                           {"name", name},
                           {"group", info.group},
                           {"started", utc_time()},
                           {"policy", policy_json(info.policy)},
                           {"settings", settings_json(info.settings)}};
    try {
      files_->history.add(line_of(header));
    } catch (const Error&) {
      std::filesystem::remove(files_->history.path(), ignored);  // no reader could use it
      throw;
    }
  }
  // Events of the run that was here before would be shown as part of this one.
  const std::filesystem::path events = place / internal::kEventFile;
  if (info.tensorboard || (info.resume && std::filesystem::exists(events, ignored))) {
    files_->events.emplace(events.string());
    files_->events->rewind(info.resume ? kEnd : kBeginning);
  } else {
    std::filesystem::remove(events, ignored);
  }
}

Recorder::~Recorder() = default;
Recorder::Recorder(Recorder&&) noexcept = default;
Recorder& Recorder::operator=(Recorder&&) noexcept = default;

Recorder::Files& Recorder::open(const char* call) const {
  internal::require(files_ != nullptr && !files_->finished, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called after " +
           (files_ == nullptr ? "this recorder was moved from; use the one it was moved to."
                              : "finish(); make a new Recorder for a new run.");
  });
  return *files_;
}

void Recorder::step(int64_t step, double loss, const StepReport& report, const Scalars& more) {
  Files& files = open("Recorder::step()");
  internal::require(!report.pending, ErrorCode::kInvalidArgument, [] {
    return "Recorder::step() got a report that is pending; ask the scaler's report() or "
           "try_report() for what the step did.";
  });
  Files::check_later("Recorder::step()", step, files.last_step);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - files.start).count();
  ordered_json line = {{"step", step},
                       {"loss", internal::number_json(loss)},
                       {"scale", internal::number_json(report.scale)},
                       {"overflow", !report.applied},
                       {"grad_norm", internal::number_json(report.grad_norm)}};
  if (report.applied) {
    line["amax"] = internal::number_json(unscaled_amax(report));
  } else {
    line["overflow_at"] = internal::number_json(report.scale);
  }
  line["seconds"] = seconds;
  static const std::set<std::string> kOwn = {"culprit", "amax", "layers",   "end",
                                             "note",    "log2", "settings", "skipped"};
  std::set<std::string> others;
  for (const std::pair<std::string, double>& scalar : more) {
    const std::string& name = scalar.first;
    internal::require(others.insert(name).second, ErrorCode::kInvalidArgument, [&] {
      return "Recorder::step() got two numbers named '" + name + "'; give each its own name.";
    });
    internal::require(!line.contains(name) && !kOwn.contains(name), ErrorCode::kInvalidArgument,
                      [&] {
                        return "Recorder::step() got a number named '" + name +
                               "', which the history uses for itself; choose another name.";
                      });
    line[name] = internal::number_json(scalar.second);
  }
  if (!report.applied) {
    line["culprit"] =
        report.culprit.empty() ? "the unscaled gradient would overflow" : report.culprit;
  }
  const int64_t skipped = files.skipped + !report.applied;
  internal::Summary summary;
  summary.scalar("loss", loss);
  summary.scalar("scale", report.scale);
  summary.scalar("grad_norm", report.grad_norm);
  summary.scalar("skipped", static_cast<double>(skipped));
  for (const auto& [name, value] : more) summary.scalar(name, value);
  files.add(line, step, summary);
  files.last_step = step;
  files.steps += 1;
  files.skipped = skipped;
  files.seconds = seconds;
}

void Recorder::layers(int64_t step, double scale, const std::vector<LayerStats>& layers) {
  Files& files = open("Recorder::layers()");
  Files::check_later("Recorder::layers()", step, files.last_look);
  internal::require(std::isfinite(scale) && scale > 0.0, ErrorCode::kInvalidArgument, [&] {
    return "Recorder::layers() got a scale of " + internal::number(scale) +
           "; it has to be the one that the gradients have.";
  });
  ordered_json line = {{"step", step}, {"scale", internal::number_json(scale)}};
  line.update(bounds_json(layers));
  line["layers"] = ordered_json::array();
  for (const LayerStats& layer : layers) line["layers"].push_back(layer_json(layer));
  internal::Summary summary;
  for (const LayerStats& layer : layers) {
    summary.log2_histogram("grad_log2/" + layer.name, layer.detail);
  }
  files.add(line, step, summary);
  files.last_look = step;
}

void Recorder::note(int64_t step, const std::string& text) {
  open("Recorder::note()").history.add(line_of({{"step", step}, {"note", text}}));
}

void Recorder::rewind(int64_t step) {
  Files& files = open("Recorder::rewind()");
  std::string ignored;  // what was damaged is not there any more
  files.keep(step, &ignored);
  if (files.events.has_value()) files.events->rewind(step);
}

void Recorder::finish(const Scalars& results, const std::string& how) {
  Files& files = open("Recorder::finish()");
  internal::require(!how.empty(), ErrorCode::kInvalidArgument, [] {
    return "Recorder::finish() was not told how the run ended; say \"finished\" or what it was.";
  });
  const ordered_json line = {{"end", how},
                             {"steps", files.steps},
                             {"skipped", files.skipped},
                             {"seconds", files.seconds},
                             {"results", scalars_json(results)}};
  files.history.add(line_of(line));
  files.finished = true;
}

}  // namespace headroom
