#include "cli/train/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <headroom/error.h>
#include <headroom/inject.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "cli/output.h"
#include "cli/suggest.h"

namespace headroom::cli {
namespace {

// The settings of a model where the user gives none.
struct Defaults {
  const char* optimizer;
  const char* schedule;
  double lr;
  int64_t steps;
  int64_t batch;
  int64_t width;
  int64_t depth;
  int64_t context;
};

const std::map<std::string, Defaults>& models() {
  static const std::map<std::string, Defaults> kModels = {
      {"field", {"adam", "cosine", 2e-3, 3000, 1024, 64, 2, 0}},
      {"lm", {"adam", "constant", 0.1, 40, 65536, 16, 1, 0}},
      {"mlp", {"adamw", "cosine", 2e-3, 400, 128, 128, 2, 0}},
      {"cnn", {"adamw", "cosine", 4e-3, 200, 64, 16, 2, 0}},
      {"gpt", {"adamw", "cosine", 4e-3, 300, 16, 64, 2, 64}},
  };
  return kModels;
}

void one_of(const char* option, const std::string& value, const std::vector<std::string>& allowed) {
  const std::string reason = not_one_of(option, value, allowed);
  if (!reason.empty()) refuse(reason);
}

void in_range(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    refuse(fmt::format("{} is {}; it must be from {} to {}.", option, value, least, most));
  }
}

template <typename T>
void use_default(T* value, const T& unset, const T& model_default) {
  if (*value == unset) *value = model_default;
}

// The canonical path, so that a run resumed from another working directory compares equal.
std::string canonical_path(const std::string& path) {
  std::error_code error;
  const auto whole =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  return path.empty() || error ? path : whole.string();
}

// Where no scale helps, only a precision of wider range does.
void check_escape(const TrainConfig& config) {
  if (config.escape.empty()) return;
  one_of("--escape", config.escape, {"bf16", "fp32"});
  if (config.precision == "fp32" && config.escape != "fp32") {
    refuse("--escape bf16 does not help from fp32, which has the same range.");
  }
  if (config.out.empty() || config.checkpoint_every == 0) {
    refuse("--escape returns to a checkpoint; give --out, and no --checkpoint-every 0.");
  }
}

void use_defaults(const Defaults& defaults, TrainConfig* config) {
  use_default(&config->optimizer, {}, std::string(defaults.optimizer));
  use_default(&config->schedule, {}, std::string(defaults.schedule));
  use_default(&config->lr, kDefaultRate, defaults.lr);
  use_default(&config->steps, kDefaultCount, defaults.steps);
  use_default(&config->batch, kDefaultCount, defaults.batch);
  use_default(&config->width, kDefaultCount, defaults.width);
  use_default(&config->depth, kDefaultCount, defaults.depth);
  use_default(&config->context, kDefaultCount, defaults.context);
  use_default(&config->loss_scale, {},
              std::string(config->precision == "fp16" ? "headroom" : "none"));
  // At an interval of ten steps, a snapshot costs far less than 1 % of the time. 200 snapshots are
  // as many as a screen shows.
  use_default(&config->layers, kDefaultCount, std::max<int64_t>(10, config->steps / 200));
  use_default(&config->checkpoint_every, kDefaultCount, std::max<int64_t>(1, config->steps / 10));
}

void check_precision(const TrainConfig& config) {
  one_of("--precision", config.precision, {"fp32", "fp16", "bf16"});
  if (config.opt_level.empty()) return;
  one_of("--opt-level", config.opt_level, {"O0", "O1", "O2", "O3"});
  if ((config.opt_level == "O0") != (config.precision == "fp32")) {
    refuse(
        fmt::format("--opt-level {} and --precision {} contradict each other; O0 is fp32, O1 "
                    "to O3 need fp16 or bf16.",
                    config.opt_level, config.precision));
  }
}

void check_rates(const TrainConfig& config) {
  if (!(config.lr > 0.0) || !std::isfinite(config.lr)) {
    refuse(fmt::format("--lr is {}; it must be a number above 0.", config.lr));
  }
  const auto clip = static_cast<float>(config.clip.value_or(1.0));  // 1e-50 becomes 0
  if (!(clip > 0.0f) || !std::isfinite(clip)) {
    refuse(fmt::format("--clip is {}; it must be a number above 0.", *config.clip));
  }
  if (!(config.timeout >= 0.001) || config.timeout > 1e6) {
    refuse(
        fmt::format("--timeout is {}; it must be from 0.001 to 1000000 seconds.", config.timeout));
  }
}

void check_sizes(const TrainConfig& config) {
  in_range("--steps", config.steps, 1, int64_t{1} << 40);
  in_range("--checkpoint-every", config.checkpoint_every, 0, int64_t{1} << 40);
  in_range("--layers", config.layers, 0, int64_t{1} << 40);
  in_range("--batch", config.batch, 1, int64_t{1} << 24);
  if (config.batch % config.part.ranks != 0) {
    refuse(fmt::format("--batch is {}; with {} ranks it must be a multiple of {}.", config.batch,
                       config.part.ranks, config.part.ranks));
  }
  in_range("--accumulate", config.accumulate, 1, int64_t{1} << 20);
  in_range("--width", config.width, 1, 1 << 14);
  in_range("--depth", config.depth, 1, 256);
  in_range("--context", config.context, config.model == "gpt" ? 1 : 0, 1 << 14);
  in_range("--threads", config.threads, 0, 1024);
  if (config.model == "gpt" && config.width % 4 != 0) {
    refuse(fmt::format("--width is {}; gpt has four heads, so it must be a multiple of 4.",
                       config.width));
  }
  if (config.model == "cnn" && config.depth > 3) {
    refuse(fmt::format("--depth is {}; cnn halves the image after every layer and allows 3.",
                       config.depth));
  }
}

void check_device(const TrainConfig& config) {
  one_of("--device", config.device, {"cpu", "cuda"});
  if (config.device == "cpu") return;
  if (config.part.ranks > 1) {
    refuse("--device cuda: several ranks train on the CPU only; use cpu.");
  }
  if (!torch::cuda::is_available()) {
    refuse("--device cuda: this LibTorch has no CUDA, or there is no CUDA device here; use cpu.");
  }
}

}  // namespace

torch::ScalarType TrainConfig::dtype() const {
  if (precision == "fp16") return torch::kHalf;
  return precision == "bf16" ? torch::kBFloat16 : torch::kFloat;
}

OptLevel TrainConfig::level() const {
  if (opt_level.empty()) return precision == "fp32" ? OptLevel::kO0 : OptLevel::kO1;
  return static_cast<OptLevel>(opt_level[1] - '0');
}

ScalePolicy TrainConfig::policy() const {
  try {
    return parse_policy_helpfully(loss_scale);
  } catch (const Error& error) {
    refuse(fmt::format("--loss-scale is '{}': {}", loss_scale, error.what()));
  }
}

void resolve(TrainConfig* config) {
  const auto model = models().find(config->model);
  if (model == models().end()) {
    std::vector<std::string> names;
    for (const auto& [name, defaults] : models()) names.push_back(name);
    refuse(fmt::format("There is no model '{}'; there are {}.{}", config->model,
                       fmt::join(names, ", "), did_you_mean(config->model, names)));
  }
  use_defaults(model->second, config);
  check_precision(*config);
  if (!config->fake_quant.empty()) one_of("--fake-quant", config->fake_quant, {"int8"});
  one_of("--optimizer", config->optimizer, {"sgd", "adam", "adamw"});
  one_of("--state", config->state, {"full", "half", "byte"});
  if (config->state != "full" && config->level() == OptLevel::kO3) {
    refuse(
        "--opt-level O3 keeps no masters, and --state half or byte store them with the weights; "
        "use O2.");
  }
  one_of("--schedule", config->schedule, {"cosine", "constant"});
  config->policy();  // throws if the loss scale is invalid
  check_rates(*config);
  check_sizes(*config);
  if (!config->inject.empty()) parse_faults(config->inject);
  check_escape(*config);
  check_device(*config);
}

TrainConfig in_precision(TrainConfig config, const std::string& precision) {
  config.precision = precision;
  config.loss_scale = "none";
  if (precision == "fp32") config.opt_level.clear();
  resolve(&config);
  return config;
}

bool may_change_on_resume(const std::string& option) {
  for (const char* name : {"--steps", "--escape", "--layers", "--checkpoint-every", "--threads"}) {
    if (option == name) return true;
  }
  return false;
}

std::vector<std::pair<std::string, std::string>> settings_of(const TrainConfig& config) {
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  return {{"--model", config.model},
          {"--data", canonical_path(config.data)},
          {"--precision", config.precision},
          {"--opt-level", fmt::format("O{}", static_cast<int>(config.level()))},
          {"--loss-scale", config.loss_scale},
          {"--optimizer", config.optimizer},
          {"--state", config.state},
          {"--lr", text(config.lr)},
          {"--schedule", config.schedule},
          {"--clip", config.clip.has_value() ? text(*config.clip) : ""},
          {"--steps", text(config.steps)},
          {"--batch", text(config.batch)},
          {"--accumulate", text(config.accumulate)},
          {"--width", text(config.width)},
          {"--depth", text(config.depth)},
          {"--context", text(config.context)},
          {"--fake-quant", config.fake_quant},
          {"--device", config.device},
          {"--ranks", text(config.part.ranks)},  // not an option; mpirun or torchrun sets it
          {"--seed", text(config.seed)},
          {"--inject", config.inject},
          {"--inject-seed", config.inject.empty() ? "" : text(config.inject_seed)},
          {"--escape", config.escape},
          {"--layers", text(config.layers)},
          {"--checkpoint-every", text(config.checkpoint_every)},
          {"--threads", config.threads > 0 ? text(config.threads) : ""}};
}

}  // namespace headroom::cli
