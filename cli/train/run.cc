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

constexpr int64_t kCastChecks = 8;  // steps per run in which lost gradients are counted
constexpr int64_t kBadLosses = 10;  // in a row, with finite gradients: no scale can help

std::unique_ptr<libtorch::FusedOptimizer> make_optimizer(const TrainConfig& config,
                                                         const torch::nn::Module& model) {
  Precision precision;
  precision.master_weights = config.level() != OptLevel::kO3;
  precision.state = state_format(config.state);
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

// The learning rate of a step, counted from 1.
double lr_at(const TrainConfig& config, int64_t step) {
  if (config.schedule == "constant") return config.lr;
  const double done = static_cast<double>(step - 1) / static_cast<double>(config.steps);
  return 0.5 * config.lr * (1.0 + std::cos(3.14159265358979323846 * done));
}

void use_threads(int threads) {
  const int count = threads > 0 ? threads : static_cast<int>(std::thread::hardware_concurrency());
  // An OpenBLAS built with its own thread pool competes with LibTorch's threads for the cores and
  // makes training five times slower. The OpenMP build shares LibTorch's threads.
  constexpr int kOwnThreads = 1;
  const auto parallel = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "openblas_get_parallel"));
  const auto set_blas =
      reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (parallel != nullptr && set_blas != nullptr && parallel() == kOwnThreads) set_blas(1);
  torch::set_num_threads(count);
  headroom::set_num_threads(count);
}

// The autocast scope of forward passes, if the opt level has one.
class Forward {
 public:
  explicit Forward(const TrainConfig& config) {
    if (config.level() == OptLevel::kO1) scope_.emplace(config.torch_device(), config.dtype());
  }

 private:
  std::optional<libtorch::Autocast> scope_;
};

// Runs forward and backward over `config.accumulate` batches, slice by slice. Returns the mean
// loss.
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

// Returns the number of elements that were changed.
int64_t inject(const Injector& injector, int64_t step, const torch::nn::Module& model) {
  libtorch::ModuleGradients gradients(model);
  const auto done = injector.inject(step, gradients.parameters());
  if (!done.empty()) gradients.write_back();
  return static_cast<int64_t>(done.size());
}

class Trainer {
 public:
  Trainer(const TrainConfig& config, Task& task, const RunContext& context)
      : config_(config),
        task_(task),
        context_(context),
        optimizer_(make_optimizer(config, task.model())),
        scaler_(
            libtorch::GradScalerOptions(config.policy())
                .device(config.torch_device())
                .ranks(context.team != nullptr ? context.team->ranks() : nullptr)
                .on_alarm([this](const AlarmReport& report) { result_.alarm = report.sentence; })),
        injector_(config.inject.empty() ? std::vector<Fault>() : parse_faults(config.inject),
                  config.inject_seed, static_cast<int>(config.part.rank)) {
    scaler_.name_parameters(task.model());
    options_.max_norm = static_cast<float>(config.clip.value_or(0.0));
    options_.clear_grads = ClearGrads::kNever;
  }

  RunResult run(const StepCallback& on_step, const std::string& note) {
    restore(note);
    const double seconds_before = result_.seconds;
    const auto start = std::chrono::steady_clock::now();
    while (done_ < config_.steps && result_.alarm.empty()) {
      StepRecord record = train_step(done_ + 1);
      record.seconds =
          seconds_before +
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      finish_step(record);
      const bool stop_requested = !on_step(record, result_);
      // Ranks stop together: the request is sent with the gradients of the next step.
      if (context_.team == nullptr ? stop_requested : stop_all_) {
        result_.interrupted = true;
        break;
      }
      stop_requested_ = stop_requested;
    }
    if (context_.team != nullptr) context_.team->check_same(task_.model().parameters());
    save_last();
    if (config_.part.rank == 0) score();
    return std::move(result_);
  }

 private:
  Training training() { return {task_, *optimizer_, scaler_}; }

  void restore(const std::string& note) {
    const bool resumed = context_.checkpoints != nullptr &&
                         context_.checkpoints->restore(training(), &result_, &done_);
    if (context_.team != nullptr) context_.team->check_same(task_.model().parameters());
    if (!resumed || context_.recorder == nullptr) return;
    context_.recorder->rewind(done_);
    if (!note.empty()) context_.recorder->note(done_, note);
  }

  // Trains one step, with retries if the policy asks for them, and writes it to the history.
  StepRecord train_step(int64_t step) {
    StepRecord record;
    record.step = step;
    record.lr = lr_at(config_, step);
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(record.lr);
    const std::string position = scaler_.policy().retries() ? task_.data_position() : "";
    double failed_scale = 0.0;  // of the last pass that overflowed
    Pass pass;
    for (;; ++record.retries) {
      if (record.retries > 0) task_.set_data_position(position);
      record.scale = scaler_.get_scale();
      pass = run_pass(record);
      if (!scaler_.retry()) break;
      failed_scale = record.scale;
    }
    record.loss = pass.loss;
    record.applied = pass.report.applied;
    record.grad_norm = pass.report.grad_norm;
    record.culprit = pass.report.culprit;
    result_.lost.values += pass.lost.values;
    result_.lost.zeroed += pass.lost.zeroed;
    result_.injected += pass.injected;
    Scalars more = {{"lr", record.lr}};
    if (!config_.inject.empty()) {
      more.emplace_back("injected", static_cast<double>(pass.injected));
    }
    if (scaler_.policy().retries()) {
      more.emplace_back("retries", static_cast<double>(record.retries));
      if (record.applied && record.retries > 0) more.emplace_back("overflow_at", failed_scale);
    }
    if (context_.recorder != nullptr) {
      context_.recorder->step(step, record.loss, pass.report, more);
    }
    return record;
  }

  // One forward and backward pass with its optimizer step, which may be skipped.
  struct Pass {
    double loss = 0.0;
    StepReport report;
    libtorch::CastLoss lost;
    int64_t injected = 0;
  };

  Pass run_pass(const StepRecord& record) {
    Pass pass;
    optimizer_->zero_grad();
    {
      std::optional<libtorch::CastMeter> meter;
      if (record.step % std::max<int64_t>(1, config_.steps / kCastChecks) == 0) meter.emplace();
      pass.loss = accumulate_gradients(config_, task_, scaler_);
      if (meter.has_value()) pass.lost = meter->loss();
    }
    if (!config_.inject.empty()) pass.injected = inject(injector_, record.step, task_.model());
    if (context_.team != nullptr) {
      stop_all_ = context_.team->average(task_.model().parameters(), &pass.loss, stop_requested_);
    }
    const bool snapshot = config_.layers > 0 && (record.step - 1) % config_.layers == 0;
    if (snapshot && record.retries == 0) snapshot_layers(record);
    pass.report = scaler_.step(*optimizer_, options_);
    if (pass.report.pending) pass.report = scaler_.report();
    scaler_.update();
    return pass;
  }

  // Gradients of an unsupported type are no reason to stop: the result says why there are no
  // layers.
  void snapshot_layers(const StepRecord& record) {
    if (!result_.no_layers.empty()) return;
    try {
      result_.layers = measure_gradients(task_.model());
      result_.layers_step = record.step;
      result_.layers_scale = record.scale;
      if (context_.recorder != nullptr) {
        context_.recorder->layers(record.step, record.scale, result_.layers);
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      result_.no_layers = error.what();
    }
  }

  void finish_step(const StepRecord& record) {
    done_ = record.step;
    result_.retries += record.retries;
    result_.skipped += !record.applied;
    result_.final_scale = scaler_.get_scale();
    result_.seconds = record.seconds;
    result_.steps.push_back(record);
    bad_losses_ = record.applied && !std::isfinite(record.loss) ? bad_losses_ + 1 : 0;
    if (bad_losses_ == kBadLosses) {
      result_.alarm = fmt::format(
          "The loss was {} in {} steps in a row while all gradients were finite, which no scale "
          "changes; look for a division by 0 or a logarithm in the loss, or train in another "
          "precision.",
          record.loss, kBadLosses);
    }
    // A state whose loss is not finite is not worth resuming.
    if (context_.checkpoints != nullptr && result_.alarm.empty() && bad_losses_ == 0) {
      context_.checkpoints->after_step(done_, training(), result_);
    }
  }

  void save_last() {
    if (context_.checkpoints == nullptr || !result_.alarm.empty()) return;
    result_.not_saved = bad_losses_ == 0 ? context_.checkpoints->finish(done_, training(), result_)
                                         : "The loss of the last step is not finite.";
  }

  void score() {
    const Forward forward(config_);
    const Score score = task_.score();
    result_.score = {plain_nan(score.loss), plain_nan(score.metric)};
    result_.metric_name = task_.metric_name();
    result_.target = task_.target();
    result_.picture = task_.result();
  }

  const TrainConfig& config_;
  Task& task_;
  RunContext context_;
  std::unique_ptr<libtorch::FusedOptimizer> optimizer_;
  libtorch::GradScaler scaler_;
  Injector injector_;
  StepOptions options_;
  RunResult result_;
  int64_t done_ = 0;             // the last step that was trained
  int64_t bad_losses_ = 0;       // in a row
  bool stop_requested_ = false;  // on this rank
  bool stop_all_ = false;        // a rank had requested it before the last step
};

}  // namespace

std::vector<LayerStats> measure_gradients(const torch::nn::Module& model) {
  return measure_layers(libtorch::ModuleGradients(model).parameters());
}

RunResult run(const TrainConfig& config, Task& task, const RunContext& context,
              const StepCallback& on_step, const std::string& note) {
  use_threads(config.threads);
  set_parameter_types(task.model(), config.level(), config.dtype());
  task.model().to(config.torch_device());
  return Trainer(config, task, context).run(on_step, note);
}

}  // namespace headroom::cli
