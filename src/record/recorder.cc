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
#include "record/float_range.h"
#include "record/history.h"

namespace headroom {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kBeforeFirst = std::numeric_limits<int64_t>::min();  // below every step
constexpr int64_t kLastStep = std::numeric_limits<int64_t>::max() - 1;

// Serialises a line. Invalid UTF-8, for example in a tensor's name, becomes U+FFFD. A line that a
// reader would refuse throws before anything is written.
std::string line_of(const ordered_json& object) {
  std::string line = object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  const std::string exceeded = internal::exceeded_limit(line);
  internal::require(exceeded.empty(), ErrorCode::kInvalidArgument, [&] {
    return "A line for the history " + exceeded +
           ", which no reader accepts; record fewer tensors or numbers.";
  });
  line += '\n';
  return line;
}

// Settings keep the order in which the user gave them.
ordered_json settings_json(const std::vector<std::pair<std::string, std::string>>& settings) {
  ordered_json object = ordered_json::object();
  for (const auto& [key, value] : settings) object[key] = value;
  return object;
}

// The current time with milliseconds, by which a report orders its runs.
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

// The policy as ScaleState::save() writes it.
ordered_json policy_json(const ScalePolicy& policy) {
  return ordered_json::parse(ScaleState(policy).save())["policy"];
}

// The largest unscaled gradient. stats.amax is scaled if the gradients in memory are; grad_norm is
// always unscaled.
double unscaled_amax(const StepReport& report) {
  const double norm = report.stats.norm();
  return norm > 0.0 ? report.stats.amax * (report.grad_norm / norm) : report.stats.amax;
}

// The histogram is written without the empty bins at its ends.
ordered_json layer_json(const LayerStats& layer) {
  const GradStats& stats = layer.stats;
  const auto [first, end] = internal::nonempty_bins(layer.detail);
  const int64_t* const bins = layer.detail.histogram.data();
  return {{"name", layer.name},
          {"count", stats.count},
          {"zeros", layer.detail.zeros},
          {"subnormals", layer.detail.subnormals},
          {"inf", stats.inf_count},
          {"nan", stats.nan_count},
          {"amax", internal::number_json(stats.amax)},
          {"from", GradDetail::kMinExponent + static_cast<int64_t>(first)},
          {"histogram", std::vector<int64_t>(bins + first, bins + end)}};
}

// The tensors that bound the scale, by name. Members are omitted where there is no such tensor.
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

// TensorBoard shows tags with the same text before the first slash as one group. The user's numbers
// are in the group "train", unless their names have a group.
std::string tag_of(const std::string& name) {
  return name.find('/') == std::string::npos ? "train/" + name : name;
}

// Why a step was skipped, if no tensor is to blame.
const char* skip_reason(const StepReport& report) {
  return report.skip == Skip::kNormTooLarge ? "the gradient norm is above skip_above_norm"
                                            : "the unscaled gradient would overflow";
}

// Notes on the steps after `until` that a rewind drops, so that a batch which fails in every
// attempt can be recognised: the history's own bad batches, and the notes of earlier attempts that
// are dropped, too. An attempt without bad batches matters if there was one with.
std::vector<ordered_json> notes_on_dropped(const std::string& path, int64_t until) {
  constexpr size_t kMostSteps = 32;  // the first ones of an attempt
  constexpr size_t kMostAttempts = 16;
  internal::HistoryReader reader(path);
  try {
    reader.read_more();
  } catch (const Error& error) {  // up to the damage
    if (error.code() != ErrorCode::kBadState) throw;
  }
  const internal::History& history = reader.history();
  std::vector<internal::DroppedAttempt> attempts;
  for (const internal::DroppedAttempt& attempt : history.dropped) {
    if (attempt.from > until) attempts.push_back(attempt);
  }
  internal::DroppedAttempt last;
  for (const internal::HistoryStep& step : history.steps) {
    if (step.step <= until) continue;
    last.reached = step.step;
    if (is_bad_batch(step) && last.bad_batches.size() < kMostSteps)
      last.bad_batches.push_back(step);
  }
  if (!last.bad_batches.empty() || (!history.dropped.empty() && last.reached > 0)) {
    attempts.push_back(last);
  }
  const size_t first = attempts.size() - std::min(attempts.size(), kMostAttempts);
  std::vector<ordered_json> notes;
  for (size_t i = first; i < attempts.size(); ++i) {
    std::string text =
        "An earlier attempt continued from here to step " + std::to_string(attempts[i].reached);
    ordered_json steps = ordered_json::array();
    for (const internal::HistoryStep& step : attempts[i].bad_batches) {
      text += (steps.empty() ? " and skipped as not finite: " : ", ") + std::to_string(step.step);
      steps.push_back({{"step", step.step},
                       {"loss", internal::number_json(step.loss)},
                       {"scale", internal::number_json(step.scale)},
                       {"inf", step.has_inf ? 1 : 0},
                       {"nan", step.has_nan ? 1 : 0}});
    }
    notes.push_back({{"step", until},
                     {"note", text + "."},
                     {"reached", attempts[i].reached},
                     {"dropped", std::move(steps)}});
  }
  return notes;
}

// The user's numbers must have distinct names, other than those that the history and the event file
// use in any line.
void check_names(const Scalars& more, const ordered_json& line) {
  static const std::set<std::string> kReserved = {
      "culprit", "amax",    "layers", "end", "note",       "log2",           "settings",
      "skipped", "dropped", "inf",    "nan", "train/loss", "train/grad_norm"};
  static const char* const kReservedGroups[] = {
      "scaler/", "underflow_lost/", "underflow_subnormal/", "grad_log2/", "results/", "_hparams_/"};
  std::set<std::string> tags;
  for (const Scalars::value_type& scalar : more) {
    const std::string& name = scalar.first;
    internal::require(tags.insert(tag_of(name)).second, ErrorCode::kInvalidArgument, [&] {
      return "Recorder::step() got two numbers named '" + name + "'; names must be unique.";
    });
    const bool group =
        std::any_of(std::begin(kReservedGroups), std::end(kReservedGroups),
                    [&](const char* reserved) { return name.rfind(reserved, 0) == 0; });
    internal::require(!line.contains(name) && !kReserved.contains(name) && !group,
                      ErrorCode::kInvalidArgument, [&] {
                        return "Recorder::step() got a number named '" + name +
                               "', which is reserved for the history; choose another name.";
                      });
  }
}

}  // namespace

// The open files of a run and the state that its next line depends on.
struct Recorder::Files {
  Files(const std::string& path, const RunInfo& info)
      : history(path), settings(info.settings), hyperparameters(info.settings) {
    hyperparameters.emplace_back("scale_policy", to_string(info.policy.rule()));
  }

  files::GrowingFile history;
  std::vector<std::pair<std::string, std::string>> settings;
  std::vector<std::pair<std::string, std::string>> hyperparameters;  // for TensorBoard
  std::optional<internal::EventFile> events;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  int64_t last_step = kBeforeFirst;
  int64_t last_snapshot = kBeforeFirst;
  int64_t steps = 0;
  int64_t skipped = 0;
  double seconds = 0.0;  // at the last step
  bool finished = false;

  double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Keeps the lines up to step `until` or up to a damaged line, whose error goes to `damage`.
  // Writes a line if the settings have changed. Returns false if the history was empty. Throws, and
  // leaves the file unchanged, if it cannot be read or does not begin with a valid header.
  bool truncate(int64_t until, std::string* damage) {
    internal::HistoryReader reader(history.path(), until);
    try {
      reader.read_more();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBadState) throw;
      if (reader.bytes() == 0) {
        throw Error(ErrorCode::kBadState,
                    std::string(error.what()) +
                        " This history cannot be resumed; move it away, or start another run.");
      }
      *damage = error.what();
    }
    history.cut(reader.bytes());
    const internal::History& kept = reader.history();
    last_step = kept.steps.empty() ? kBeforeFirst : kept.steps.back().step;
    last_snapshot = kept.snapshots.empty() ? kBeforeFirst : kept.snapshots.back().step;
    steps = static_cast<int64_t>(kept.steps.size());
    skipped = kept.skipped;
    seconds = kept.steps.empty() ? 0.0 : kept.steps.back().seconds;
    // Continue the clock of the resumed run. The clamp guards against a time that is not plausible.
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

  // Starts a new history, replacing an old one.
  void begin(const RunInfo& info) {
    history.cut(0);
    std::string name = info.name;
    if (name.empty()) {
      name = std::filesystem::absolute(history.path()).parent_path().filename().string();
    }
    try {
      history.add(line_of({{"format", internal::kHistoryFormat},
                           {"version", internal::kHistoryVersion},
                           {"headroom", HEADROOM_VERSION},
                           {"name", name},
                           {"group", info.group},
                           {"started", utc_time()},
                           {"policy", policy_json(info.policy)},
                           {"settings", settings_json(info.settings)}}));
    } catch (const Error&) {
      std::error_code ignored;
      std::filesystem::remove(history.path(), ignored);  // no reader could use an empty history
      throw;
    }
  }

  // An existing event file that is not continued is removed: TensorBoard would show its events as
  // part of this run.
  void open_events(const std::filesystem::path& path, const RunInfo& info) {
    std::error_code ignored;
    if (info.tensorboard || (info.resume && std::filesystem::exists(path, ignored))) {
      events.emplace(path.string());
      rewind_events(info.resume ? kLastStep : kBeforeFirst);
    } else {
      std::filesystem::remove(path, ignored);
    }
  }

  // The settings of the HParams plugin come first and are kept by every rewind.
  void rewind_events(int64_t step) {
    if (!events->rewind(step)) return;
    internal::Summary session;
    session.session_start(hyperparameters);
    events->add(session);
  }

  // Writes to both files or, if one fails, to neither.
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

  // The results as scalars of the last step, so that the HParams plugin lists them beside the
  // settings, and the end. A resumed run drops the end, because it is after every step.
  void finish_events(const Scalars& results, bool success) {
    internal::Summary metrics;
    for (const auto& [name, value] : results) metrics.scalar("results/" + name, value);
    events->add(std::max<int64_t>(last_step, 0), metrics);
    internal::Summary end;
    end.session_end(success);
    events->add(kLastStep + 1, end);
  }

  // Steps and snapshots are written in order, which readers rely on.
  static void check_later(const char* call, int64_t step, int64_t last) {
    internal::require(step > last, ErrorCode::kInvalidArgument, [&] {
      return std::string(call) + " got step " + std::to_string(step) + " after step " +
             std::to_string(last) + "; steps must increase.";
    });
  }
};

Recorder::Recorder(const std::string& folder, const RunInfo& info) {
  validate(info.policy);
  files::make_folders(folder);
  const std::filesystem::path place(folder);
  files_ = std::make_unique<Files>((place / internal::kHistoryFile).string(), info);
  std::string damage;
  if (!info.resume || !files_->truncate(kLastStep, &damage)) files_->begin(info);
  if (!damage.empty()) {
    note(std::max<int64_t>(files_->last_step, 0), "Everything after this step was lost: " + damage);
  }
  files_->open_events(place / internal::kEventFile, info);
}

Recorder::~Recorder() = default;
Recorder::Recorder(Recorder&&) noexcept = default;
Recorder& Recorder::operator=(Recorder&&) noexcept = default;

// The files, if the recorder may still be used for `call`.
Recorder::Files& Recorder::open(const char* call) const {
  internal::require(files_ != nullptr && !files_->finished, ErrorCode::kWrongOrder, [&] {
    return std::string(call) + " was called after " +
           (files_ == nullptr ? "this recorder was moved from; use the one it was moved to."
                              : "finish(); create another Recorder for a new run.");
  });
  return *files_;
}

void Recorder::step(int64_t step, double loss, const StepReport& report, const Scalars& more) {
  Files& files = open("Recorder::step()");
  internal::require(!report.pending, ErrorCode::kInvalidArgument, [] {
    return "Recorder::step() got a report that is pending; call the scaler's report() or "
           "try_report() for the completed one.";
  });
  Files::check_later("Recorder::step()", step, files.last_step);
  const double seconds = files.elapsed();
  const int64_t skipped = files.skipped + !report.applied;
  ordered_json line = {{"step", step},
                       {"loss", internal::number_json(loss)},
                       {"scale", internal::number_json(report.scale)},
                       {"overflow", !report.applied},
                       {"grad_norm", internal::number_json(report.grad_norm)}};
  if (report.applied) {
    line["amax"] = internal::number_json(unscaled_amax(report));
  } else {
    // With this key, `headroom replay` knows at which scale the step overflows.
    line["overflow_at"] = internal::number_json(report.scale);
  }
  line["seconds"] = seconds;
  internal::Summary summary;
  summary.scalar("train/loss", loss);
  summary.scalar("train/grad_norm", report.grad_norm);
  summary.scalar("scaler/log2_scale", std::log2(report.scale));
  summary.scalar("scaler/scale", report.scale);
  summary.scalar("scaler/skipped", static_cast<double>(skipped));
  check_names(more, line);
  for (const auto& [name, value] : more) {
    line[name] = internal::number_json(value);
    summary.scalar(tag_of(name), value);
  }
  if (!report.applied) {
    line["culprit"] = report.culprit.empty() ? skip_reason(report) : report.culprit;
    line["inf"] = report.stats.inf_count;
    line["nan"] = report.stats.nan_count;
  }
  // If writing throws, the recorder is unchanged and can be used on.
  files.add(line, step, summary);
  files.last_step = step;
  files.steps += 1;
  files.skipped = skipped;
  files.seconds = seconds;
}

void Recorder::layers(int64_t step, double scale, const std::vector<LayerStats>& layers) {
  Files& files = open("Recorder::layers()");
  Files::check_later("Recorder::layers()", step, files.last_snapshot);
  internal::require(std::isfinite(scale) && scale > 0.0, ErrorCode::kInvalidArgument, [&] {
    return "Recorder::layers() got a scale of " + internal::number(scale) +
           "; pass the scale of the gradients.";
  });
  ordered_json line = {{"step", step}, {"scale", internal::number_json(scale)}};
  line.update(bounds_json(layers));  // computed here, so that readers need not
  ordered_json& objects = line["layers"] = ordered_json::array();
  internal::Summary summary;
  const internal::FloatRange& range = internal::range_of(files.settings);
  const ScaleBounds bounds = internal::bounds_in(range, layers);
  if (bounds.first_to_overflow >= 0) {
    summary.scalar("scaler/doublings_left", bounds.doublings_left);
  }
  for (const LayerStats& layer : layers) {
    objects.push_back(layer_json(layer));
    const Fp16Zones zones = internal::zones_in(range, layer);
    summary.scalar("underflow_lost/" + layer.name, zones.lost_share());
    summary.scalar("underflow_subnormal/" + layer.name, zones.subnormal_share());
    summary.log2_histogram("grad_log2/" + layer.name, layer.detail);
  }
  files.add(line, step, summary);
  files.last_snapshot = step;
}

void Recorder::note(int64_t step, const std::string& text) {
  open("Recorder::note()").history.add(line_of({{"step", step}, {"note", text}}));
}

void Recorder::settings(std::vector<std::pair<std::string, std::string>> settings) {
  Files& files = open("Recorder::settings()");
  const ordered_json now = settings_json(settings);
  files.history.add(line_of({{"step", std::max<int64_t>(files.last_step, 0)}, {"settings", now}}));
  files.settings = std::move(settings);
}

void Recorder::rewind(int64_t step) {
  Files& files = open("Recorder::rewind()");
  std::string damage;  // everything after it is dropped anyway
  const std::vector<ordered_json> notes = notes_on_dropped(files.history.path(), step);
  files.truncate(step, &damage);
  for (const ordered_json& note : notes) files.history.add(line_of(note));
  if (files.events.has_value()) files.rewind_events(step);
}

void Recorder::finish(const Scalars& results, const std::string& how) {
  Files& files = open("Recorder::finish()");
  internal::require(!how.empty(), ErrorCode::kInvalidArgument, [] {
    return "Recorder::finish() needs a text on how the run ended, such as \"finished\".";
  });
  ordered_json object = ordered_json::object();
  for (const auto& [name, value] : results) object[name] = internal::number_json(value);
  const int64_t before = files.history.size();
  files.history.add(line_of({{"end", how},
                             {"steps", files.steps},
                             {"skipped", files.skipped},
                             {"seconds", files.seconds},
                             {"results", object}}));
  try {
    if (files.events.has_value()) files.finish_events(results, how == "finished");
  } catch (const Error&) {
    files.history.cut(before);
    throw;
  }
  files.finished = true;
}

}  // namespace headroom
