#include "cli/train/run.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>

#include "cli/output.h"
#include "cli/train/checkpoint.h"
#include "cli/train/layers.h"

namespace headroom::cli {
namespace {

constexpr int64_t kLooks = 8;       // steps of a run in which lost gradients are counted
constexpr int64_t kBadLosses = 10;  // in a row, with good gradients: no scale can help

std::unique_ptr<libtorch::FusedOptimizer> make_optimizer(const TrainConfig& config,
                                                         const torch::nn::Module& model) {
  Precision precision;
  precision.master_weights = config.level() != OptLevel::kO3;
  const std::vector<torch::Tensor> params = model.parameters();
  if (config.optimizer == "sgd") {
    return std::make_unique<libtorch::FusedSGD>(
        params, torch::optim::SGDOptions(config.lr).momentum(0.9), precision);
  }
  if (config.optimizer == "adam") {
    return std::make_unique<libtorch::FusedAdam>(params, torch::optim::AdamOptions(config.lr),
                                                 precision);
  }
  return std::make_unique<libtorch::FusedAdamW>(params, torch::optim::AdamWOptions(config.lr),
                                                precision);
}

double lr_at(const TrainConfig& config, int64_t step) {
  if (config.schedule == "constant") return config.lr;
  const double done = static_cast<double>(step - 1) / static_cast<double>(config.steps);
  return 0.5 * config.lr * (1.0 + std::cos(3.14159265358979323846 * done));
}

void use_threads(int threads) {
  const int count = threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency());
  // An OpenBLAS with threads of its own would fight with LibTorch's for the cores, at a fifth of
  // the speed; its other builds share them.
  constexpr int kOwnThreads = 1;
  const auto parallel = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "openblas_get_parallel"));
  const auto set_blas =
      reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (parallel != nullptr && set_blas != nullptr && parallel() == kOwnThreads) set_blas(1);
  torch::set_num_threads(count);
  headroom::set_num_threads(count);
}

// The scope in which losses and scores are computed.
class Forward {
 public:
  explicit Forward(const TrainConfig& config) {
    if (config.level() == OptLevel::kO1) scope_.emplace(config.torch_device(), config.dtype());
  }

 private:
  std::optional<libtorch::Autocast> scope_;
};

// Backward through every slice of `config.accumulate` batches; the mean loss.
double accumulate_gradients(const TrainConfig& config, Task& task, libtorch::GradScaler& scaler) {
  torch::Tensor total = torch::zeros({}, config.torch_device());
  for (int64_t batch = 0; batch < config.accumulate; ++batch) {
    task.next_batch();
    for (int64_t slice = 0; slice < task.slices(); ++slice) {
      torch::Tensor loss;
      {
        const Forward forward(config);
        loss = task.loss(slice) / static_cast<double>(config.accumulate);
      }
      scaler.scale(loss).backward();
      total += loss.detach();
    }
  }
  return plain_nan(total.item<double>());
}

// Returns how many elements were hit.
int64_t inject(const Injector& injector, int64_t step, const torch::nn::Module& model) {
  libtorch::ModuleGradients gradients(model);
  const auto done = injector.inject(step, gradients.parameters());
  if (!done.empty()) gradients.write_back();
  return static_cast<int64_t>(done.size());
}

}  // namespace

std::vector<LayerStats> look_at_layers(const torch::nn::Module& model) {
  return measure_layers(libtorch::ModuleGradients(model).parameters());
}

namespace {

void look(int64_t step, double scale, const torch::nn::Module& model, Recorder* recorder,
          RunResult* result) {
  if (!result->no_layers.empty()) return;
  try {
    result->layers = look_at_layers(model);
    result->layers_step = step;
    result->layers_scale = scale;
    if (recorder != nullptr) recorder->layers(step, scale, result->layers);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    result->no_layers = error.what();
  }
}

}  // namespace

RunResult run(const TrainConfig& config, Task& task, const Aids& aids,
              const std::function<bool(const StepRecord&, const RunResult&)>& on_step,
              const std::string& note) {
  const auto [team, recorder, checkpoints] = aids;
  use_threads(config.threads);
  RunResult result;
  set_parameter_types(task.model(), config.level(), config.dtype());
  task.model().to(config.torch_device());
  const auto optimizer = make_optimizer(config, task.model());
  libtorch::GradScaler scaler(
      libtorch::GradScalerOptions(config.policy())
          .device(config.torch_device())
          .ranks(team != nullptr ? team->ranks() : nullptr)
          .on_alarm([&](const AlarmReport& report) { result.alarm = report.sentence; }));
  scaler.name_parameters(task.model());
  bool stop_here = false;
  StepOptions options;
  options.max_norm = static_cast<float>(config.clip.value_or(0.0));
  options.clear_grads = ClearGrads::kNever;
  const int64_t look_every = std::max<int64_t>(1, config.steps / kLooks);

  const Training training{task, *optimizer, scaler};
  int64_t done = 0;
  const bool resumed = checkpoints != nullptr && checkpoints->restore(training, &result, &done);
  if (team != nullptr) team->check_same(task.model().parameters());
  if (resumed && recorder != nullptr) {
    recorder->rewind(done);
    if (!note.empty()) recorder->note(done, note);
  }
  const Injector injector(
      config.inject.empty() ? std::vector<Fault>() : parse_faults(config.inject),
      config.inject_seed, static_cast<int>(config.part.rank));
  int64_t bad_losses = 0;

  const double before = result.seconds;
  const auto start = std::chrono::steady_clock::now();
  while (done < config.steps && result.alarm.empty()) {
    const int64_t step = done + 1;
    StepRecord record;
    record.step = step;
    record.lr = lr_at(config, step);
    for (auto& group : optimizer->param_groups()) group.options().set_lr(record.lr);
    const std::string position = scaler.policy().retries() ? task.data_position() : "";
    bool stop = stop_here;
    int64_t hits = 0;
    double failed_scale = 0.0;  // the last one before the one that passed
    libtorch::CastLoss lost;
    StepReport report;
    for (;; ++record.retries) {
      if (record.retries > 0) task.set_data_position(position);
      record.scale = scaler.get_scale();
      optimizer->zero_grad();
      {
        std::optional<libtorch::CastMeter> meter;
        if (step % look_every == 0) meter.emplace();
        record.loss = accumulate_gradients(config, task, scaler);
        if (meter.has_value()) lost = meter->loss();
      }
      if (!config.inject.empty()) hits = inject(injector, step, task.model());
      if (team != nullptr) stop = team->average(task.model().parameters(), &record.loss, stop_here);
      if (record.retries == 0 && config.layers > 0 && (step - 1) % config.layers == 0) {
        look(step, record.scale, task.model(), recorder, &result);
      }
      report = scaler.step(*optimizer, options);
      if (report.pending) report = scaler.report();
      scaler.update();
      if (!scaler.retry()) break;
      failed_scale = record.scale;
    }
    result.lost.values += lost.values;
    result.lost.zeroed += lost.zeroed;
    result.injected += hits;
    result.retries += record.retries;
    Scalars more = {{"lr", record.lr}};
    if (!config.inject.empty()) more.emplace_back("injected", static_cast<double>(hits));
    if (scaler.policy().retries()) {
      more.emplace_back("retries", static_cast<double>(record.retries));
      if (report.applied && record.retries > 0) more.emplace_back("overflow_at", failed_scale);
    }
    if (recorder != nullptr) recorder->step(step, record.loss, report, more);
    record.applied = report.applied;
    record.grad_norm = report.grad_norm;
    record.culprit = report.culprit;
    record.seconds =
        before + std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    result.skipped += !report.applied;
    result.final_scale = scaler.get_scale();
    result.seconds = record.seconds;
    result.steps.push_back(record);
    done = step;
    bad_losses = report.applied && !std::isfinite(record.loss) ? bad_losses + 1 : 0;
    if (bad_losses == kBadLosses) {
      result.alarm = fmt::format(
          "The loss was {} in {} steps in a row while all gradients were finite, which no scale "
          "changes; look for a division by 0 or a logarithm in the loss, or train in another "
          "precision.",
          record.loss, kBadLosses);
    }
    if (checkpoints != nullptr && result.alarm.empty() && bad_losses == 0) {
      checkpoints->after_step(done, training, result);
    }
    stop_here = !on_step(record, result);
    if (team == nullptr ? stop_here : stop) {  // a team stops in the same step
      result.interrupted = true;
      break;
    }
  }
  if (team != nullptr) team->check_same(task.model().parameters());
  if (checkpoints != nullptr && result.alarm.empty()) {
    result.not_saved = bad_losses == 0 ? checkpoints->finish(done, training, result)
                                       : "The loss of the last step is not finite.";
  }
  if (config.part.rank > 0) return result;
  const Forward forward(config);
  result.score = task.score();
  result.score = {plain_nan(result.score.loss), plain_nan(result.score.metric)};
  result.metric_name = task.metric_name();
  result.target = task.target();
  result.picture = task.result();
  return result;
}

}  // namespace headroom::cli
