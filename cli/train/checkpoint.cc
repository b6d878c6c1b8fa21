#include "cli/train/checkpoint.h"

#include <fmt/format.h>
#include <headroom/error.h>
#include <headroom/measure.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/train/random_state.h"
#include "files/file.h"
#include "record/history.h"
#include "record/text.h"

namespace headroom::cli {
namespace {

using nlohmann::json;

constexpr const char* kProgram = "headroom train";
constexpr int kVersion = 1;

[[noreturn]] void bad(const Checkpoint& checkpoint, const std::string& why) {
  throw Error(ErrorCode::kBadState, fmt::format("'{}' {}.", checkpoint.path(), why));
}

[[noreturn]] void refuse_changed_setting(const std::string& path, const std::string& name,
                                         const std::string& now, const std::string& before) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is {}, but the run in '{}' has {}; omit {} to resume that run, or "
                          "choose another --out.",
                          name, now.empty() ? "not given" : now, path,
                          before.empty() ? "none" : before, name));
}

using Settings = std::vector<std::pair<std::string, std::string>>;

// The settings in a checkpoint. The file is untrusted: it may only set options that describe the
// run, not others such as --watch, which opens a port.
Settings settings_in(const Checkpoint& checkpoint, const json& state) {
  auto settings = state.at("settings").get<Settings>();
  const Settings known = settings_of(TrainConfig{});
  for (const auto& setting : settings) {
    const bool saved = std::any_of(known.begin(), known.end(),
                                   [&](const auto& one) { return one.first == setting.first; });
    if (saved) continue;
    bad(checkpoint, fmt::format("has a setting {}, which headroom train does not save",
                                files::in_quotes(setting.first)));
  }
  return settings;
}

// Calls use(state, settings) with the checkpoint's JSON. Throws Error(kBadState) if anything in it
// is missing or of another type.
template <typename Use>
auto with_state(const Checkpoint& checkpoint, const Use& use) {
  const std::string exceeded = internal::exceeded_limit(checkpoint.state());
  if (!exceeded.empty()) bad(checkpoint, "has a state that " + exceeded);
  try {
    const json state = json::parse(checkpoint.state());
    if (state.at("program") != kProgram || state.at("version") != kVersion) {
      bad(checkpoint, "is not a checkpoint of this version of headroom train");
    }
    return use(state, settings_in(checkpoint, state));
  } catch (const json::exception& error) {
    bad(checkpoint, fmt::format("has a state that cannot be read: {}", error.what()));
  }
}

torch::Generator torch_generator(const std::string& device) {
  return at::globalContext().defaultGenerator(device == "cpu" ? torch::Device(torch::kCPU)
                                                              : torch::Device(torch::kCUDA, 0));
}

// Parameters and buffers with their names.
std::vector<std::pair<std::string, torch::Tensor>> tensors_of(const torch::nn::Module& model) {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto& item : model.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

std::string state_name(const std::string& parameter, const libtorch::StateTensor& item) {
  return parameter + "/" + item.name;
}

torch::Tensor tensor_of(const Checkpoint& checkpoint, const std::string& name,
                        torch::IntArrayRef sizes) {
  const CheckpointTensor* const found = checkpoint.find(name);
  if (found == nullptr) bad(checkpoint, fmt::format("has no tensor '{}'", name));
  if (torch::IntArrayRef(found->shape) != sizes) {
    bad(checkpoint, fmt::format("has a tensor '{}' whose size differs from the model's", name));
  }
  constexpr torch::ScalarType kTypes[] = {torch::kHalf, torch::kBFloat16, torch::kFloat,
                                          torch::kDouble};
  return torch::from_blob(found->tensor.data, sizes,
                          kTypes[static_cast<size_t>(found->tensor.dtype)]);
}

// The name of a tensor that is not finite, if there is one. Such a state is not worth resuming.
std::string find_not_finite(const std::vector<CheckpointTensor>& tensors) {
  for (const CheckpointTensor& item : tensors) {
    const GradStats stats = measure({item.tensor});
    if (stats.inf_count + stats.nan_count > 0) return item.name;
  }
  return "";
}

// Reads the steps up to `until` from the history.
void read_steps(const std::string& folder, int64_t until, RunResult* result) {
  try {
    internal::HistoryReader reader(folder + "/" + internal::kHistoryFile, until);
    reader.read_more();
    for (const internal::HistoryStep& step : reader.history().steps) {
      result->steps.push_back({step.step, step.loss, step.scale, step.grad_norm, 0.0, step.seconds,
                               step.applied, step.culprit});
    }
    result->skipped = reader.history().skipped;
    if (!result->steps.empty()) result->seconds = result->steps.back().seconds;
  } catch (const Error&) {
    // The run can be resumed without its old history; a new one begins here.
  }
}

}  // namespace

void Checkpoints::use_settings(const TrainConfig& config) {
  settings_ = settings_of(config);
  device_ = config.device;
  every_ = config.checkpoint_every;
  save_first_ = !config.escape.empty();
}

void Checkpoints::begin(const TrainConfig& config) {
  use_settings(config);
  for (const auto& [name, value] : settings_) {
    const std::string kept = internal::valid_utf8(value);
    if (every_ == 0 || kept == value) continue;
    refuse(
        fmt::format("{} is '{}', which is not UTF-8 and cannot be saved in a checkpoint; rename "
                    "it, or train with --checkpoint-every 0.",
                    name, kept));
  }
  if (!writes_) return;
  folder_.emplace(path_);
  folder_->clear();
}

void Checkpoints::read_settings(CLI::App& command) {
  folder_.emplace(path_, writes_ ? FolderUse::kOwn : FolderUse::kRead);
  const Checkpoint newest = folder_->load([&](const Checkpoint& checkpoint) {
    with_state(checkpoint, [&](const json& state, const Settings& settings) {
      escaped_ = state.at("escaped").get<std::string>();
      settings_ = settings;
    });
  });
  last_ = newest.step();
  for (const auto& [name, value] : settings_) {
    CLI::Option* const option = command.get_option_no_throw(name);
    if (option == nullptr || value.empty()) continue;
    if (option->count() > 0) {
      // Checked before the others, because these determine the defaults of the others.
      const bool first = name == "--model" || name == "--precision" || name == "--opt-level";
      const auto given = option->as<std::string>();
      if (first && given != value) refuse_changed_setting(path_, name, given, value);
      continue;
    }
    option->add_result(value);
    option->run_callback();
  }
}

void Checkpoints::resume(TrainConfig* config) {
  const auto now = settings_of(*config);
  for (size_t i = 0; i < now.size(); ++i) {
    const auto& [name, value] = now[i];
    const bool same = i < settings_.size() && settings_[i] == now[i];
    if (same || may_change_on_resume(name)) continue;
    if (name == "--ranks") {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("The run in '{}' had {} ranks, not {}; resume it with as many.",
                              path_, i < settings_.size() ? settings_[i].second : "1", value));
    }
    refuse_changed_setting(path_, name, value, i < settings_.size() ? settings_[i].second : "");
  }
  if (config->steps < last_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--steps is {}, but the run in '{}' has already done {}.",
                            config->steps, path_, last_));
  }
  use_settings(*config);
  resumed_ = true;
  if (!escaped_.empty()) *config = in_precision(*config, escaped_);
}

void Checkpoints::escape(const std::string& precision) {
  escaped_ = precision;
  resumed_ = true;
}

bool Checkpoints::restore(const Training& training, RunResult* result, int64_t* step) {
  if (!resumed_) {
    if (save_first_) try_save(0, training, *result);
    return false;
  }
  if (!folder_.has_value()) folder_.emplace(path_, FolderUse::kRead);
  std::vector<std::string> skipped;
  const Checkpoint used = folder_->load(
      [&](const Checkpoint& checkpoint) { load(checkpoint, training, result); }, &skipped);
  if (writes_) {
    print_left_out(skipped);
    print_error(
        fmt::format("headroom: resuming after step {}, from '{}'\n", used.step(), used.path()));
  }
  read_steps(path_, used.step(), result);
  const auto known = static_cast<int64_t>(result->steps.size());
  if (writes_ && known < used.step()) {
    print_error(
        fmt::format("headroom: the history in '{}' is damaged or truncated; the report will lack "
                    "{} of the first {} "
                    "steps.\n",
                    path_, used.step() - known, used.step()));
  }
  result->final_scale = training.scaler.get_scale();
  last_ = *step = used.step();
  return true;
}

void Checkpoints::load(const Checkpoint& checkpoint, const Training& training,
                       RunResult* result) const {
  const torch::NoGradGuard no_grad;
  const torch::nn::Module& model = training.task.model();
  const std::string wrong = find_not_finite(checkpoint.tensors());
  if (!wrong.empty()) bad(checkpoint, fmt::format("has inf or nan in '{}'", wrong));
  const auto tensors = tensors_of(model);
  with_state(checkpoint, [&](const json& state, const Settings&) {
    // After a change of precision, weights are loaded from the masters, and masters that the
    // checkpoint does not have from the weights.
    const bool same = state.at("escaped").get<std::string>() == escaped_;
    const auto name_or = [&](const std::string& name, const std::string& other) {
      return same || checkpoint.find(name) != nullptr ? name : other;
    };
    std::vector<torch::Tensor> values;
    for (const auto& [name, tensor] : tensors) {
      const std::string from = same ? name : name_or(name + "/master", name);
      values.push_back(tensor_of(checkpoint, from, tensor.sizes()));
    }
    libtorch::FusedState optimizer = training.optimizer.fused_state();
    for (libtorch::StateTensor& item : optimizer.tensors) {
      const std::string& name = tensors[item.parameter].first;
      const std::string from = state_name(name, item);
      item.tensor = tensor_of(checkpoint, item.name == "master" ? name_or(from, name) : from,
                              item.tensor.sizes());
    }
    optimizer.steps = state.at("optimizer_steps").get<std::vector<int64_t>>();
    const json& random = state.at("random");
    const json& lost = state.at("lost");
    // All tensors have been validated by now. The next three calls validate their own input.
    if (same) training.scaler.load(state.at("scaler").get<std::string>());
    training.task.set_data_position(random.at("data").get<std::string>());
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].second.data().copy_(values[i]);
    optimizer.format = StateFormat::kFull;  // of the checkpoint: not recorded, but the weights are
    training.optimizer.load_fused_state(optimizer);
    torch::Generator generator = torch_generator("cpu");
    set_random_state(generator, random.at("torch").get<std::string>());
    if (device_ != "cpu") {
      generator = torch_generator(device_);
      set_random_state(generator, random.at("device").get<std::string>());
    }
    result->injected = state.at("injected").get<int64_t>();
    result->retries = state.value("retries", int64_t{0});
    result->lost = {lost.at("values").get<int64_t>(), lost.at("zeroed").get<int64_t>()};
  });
}

void Checkpoints::save(int64_t step, const Training& training, const RunResult& result) {
  const torch::NoGradGuard no_grad;
  auto named = tensors_of(training.task.model());
  const libtorch::FusedState optimizer = training.optimizer.fused_state();
  for (const libtorch::StateTensor& item : optimizer.tensors) {
    named.emplace_back(state_name(named[item.parameter].first, item), item.tensor);
  }
  std::vector<CheckpointTensor> tensors;
  for (auto& [name, tensor] : named) {
    tensor = tensor.detach().cpu().contiguous();
    tensors.push_back({name, libtorch::view_of(tensor, name), tensor.sizes().vec()});
  }
  const std::string wrong = find_not_finite(tensors);
  if (!wrong.empty()) {
    throw Error(
        ErrorCode::kBadState,
        fmt::format("Step {} has inf or nan in '{}' and cannot be resumed from.", step, wrong));
  }
  json random = {{"torch", random_state(torch_generator("cpu"))},
                 {"data", training.task.data_position()}};
  if (device_ != "cpu") random["device"] = random_state(torch_generator(device_));
  const json state = {{"program", kProgram},
                      {"version", kVersion},
                      {"settings", settings_},
                      {"escaped", escaped_},
                      {"scaler", training.scaler.save()},
                      {"optimizer_steps", optimizer.steps},
                      {"random", random},
                      {"injected", result.injected},
                      {"retries", result.retries},
                      {"lost", {{"values", result.lost.values}, {"zeroed", result.lost.zeroed}}}};
  folder_->save(step, tensors, state.dump());
  last_ = step;
}

void Checkpoints::after_step(int64_t step, const Training& training, const RunResult& result) {
  if (every_ > 0 && step % every_ == 0) try_save(step, training, result);
}

void Checkpoints::try_save(int64_t step, const Training& training, const RunResult& result) {
  if (!writes_) return;
  try {
    save(step, training, result);
  } catch (const std::exception& error) {
    print_error(fmt::format("headroom: {} Training continues without this checkpoint{}.\n",
                            error.what(),
                            last_ < 0 ? "" : fmt::format("; that of step {} is kept", last_)));
  }
}

std::string Checkpoints::finish(int64_t step, const Training& training, const RunResult& result) {
  if (every_ == 0 || step == last_ || !writes_) return "";
  try {
    save(step, training, result);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace headroom::cli
