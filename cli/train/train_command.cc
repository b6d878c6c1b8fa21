#include <fmt/format.h>
#include <headroom/diagnose.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/program.h"
#include "cli/train/checkpoint.h"
#include "cli/train/image.h"
#include "cli/train/options.h"
#include "cli/train/watch.h"

namespace headroom::cli {
namespace {

constexpr int kInterrupted = 130;
constexpr int kNotSaved = 1;
constexpr int kRankLost = 1;
constexpr int kBadInput = 2;
constexpr int kGaveUp = 3;

// CLI11 would parse -1 as 2^64 - 1.
std::string not_negative(const std::string& text) {
  return text.find('-') == std::string::npos ? ""
                                             : fmt::format("it is {}; it must be 0 or more.", text);
}

std::string percent(const libtorch::CastLoss& lost) {
  if (lost.values == 0) return "not measured";
  return fmt::format("{:.2f} % of the values that were not zero",
                     100.0 * static_cast<double>(lost.zeroed) / static_cast<double>(lost.values));
}

void draw(const TrainConfig& config, const RunResult& result) {
  if (!can_draw() || result.steps.empty()) return;
  write_curves(config.out + "/curves.png", config.model, {curve_of(config.precision, result)});
  if (result.picture.values.empty()) return;
  const std::string caption = fmt::format("{} {:.4f}", result.metric_name, result.score.metric);
  write_panels(config.out + "/field.png", config.model,
               {{"target", "", result.target}, {"fitted", caption, result.picture}});
}

template <typename... Values>
void print_fact(const std::string& name, const char* format, const Values&... values) {
  print("  {:<16}  {}\n", name, fmt::format(fmt::runtime(format), values...));
}

std::string doublings(const ScaleBounds& bounds) {
  const double left = std::floor(bounds.doublings_left);
  return fmt::format("after {:.0f} more doubling{}", left, left == 1.0 ? "" : "s");
}

// Prints which layers bound the scale at the last snapshot.
void print_bounds(const RunResult& result, const std::string& precision) {
  if (!result.no_layers.empty()) print_fact("layers", "not measured. {}", result.no_layers);
  const ScaleBounds bounds = scale_bounds(result.layers);
  const auto name = [&](int64_t index) { return result.layers[static_cast<size_t>(index)].name; };
  const std::string when =
      fmt::format("at step {}, scale {}{}", result.layers_step, scale_number(result.layers_scale),
                  precision == "fp16" ? "" : ", if it were in FP16");
  if (bounds.first_to_overflow >= 0) {
    print_fact("overflows first", "{}, {} ({})", name(bounds.first_to_overflow),
               bounds.doublings_left < 0.0 ? "which has overflowed" : doublings(bounds), when);
  }
  if (bounds.first_to_underflow >= 0) {
    print_fact("underflows first", "{}, {:.2f} % lost and {:.2f} % subnormal in FP16 ({})",
               name(bounds.first_to_underflow), 100.0 * bounds.lost, 100.0 * bounds.subnormal,
               when);
  }
}

// Prints the most important advice on the run in the folder.
void print_advice(const std::string& folder) {
  constexpr size_t kMost = 2;
  Diagnosis diagnosis = diagnose(folder).at(0);
  const size_t more = diagnosis.findings.size() - std::min(kMost, diagnosis.findings.size());
  diagnosis.findings.resize(diagnosis.findings.size() - more);
  print("\n{}", diagnosis.to_string(terminal_width(STDOUT_FILENO)));
  if (more > 0) print("   headroom diagnose {} has {} more.\n", folder, more);
}

// Takes settings that are missing on the command line from the checkpoint.
void open_to_resume(CLI::App& command, const TrainConfig& config,
                    std::optional<Checkpoints>* checkpoints) {
  if (!std::filesystem::is_directory(config.out)) {
    const std::string given =
        config.out.empty() ? "--out is missing" : fmt::format("'{}' is no folder", config.out);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--resume needs the folder of a run, --out DIR; {}.", given));
  }
  checkpoints->emplace(config.out, config.part.rank == 0);
  (*checkpoints)->read_settings(command);
}

// After Ctrl-C: the command that continues the run.
void print_how_to_resume(const TrainConfig& config) {
  if (config.out.empty() || config.checkpoint_every == 0) {
    print("\nNothing was saved to resume from; --out DIR saves checkpoints.\n");
  } else {
    print("\nTo resume: {} train --out {} --resume\n", shell_word(called_as()),
          shell_word(config.out));
  }
}

// Reports how the run ended and what could not be written. Returns the exit status.
int report_end(const RunResult& result, const std::vector<std::string>& not_written) {
  int status = result.interrupted ? kInterrupted : 0;
  if (!result.not_saved.empty()) status = kNotSaved;
  if (!result.alarm.empty()) {
    status = kGaveUp;
    print_error(
        fmt::format("headroom: stopped at step {}. {}\n", result.steps.back().step, result.alarm));
  }
  if (!result.not_saved.empty()) {
    print_error(fmt::format("headroom: the end of the run is not saved. {}\n", result.not_saved));
  }
  for (const std::string& sentence : not_written)
    print_error(fmt::format("headroom: {}\n", sentence));
  return status == 0 && !not_written.empty() ? kNotSaved : status;
}

// Trains, alone or as one of several ranks, and prints the results on the first rank.
int train(const TrainConfig& config, Checkpoints* checkpoints, Team* team) {
  const auto task = make_task(config);
  const Interrupt interrupt;
  RunInfo info;
  info.name = fmt::format("{} {} {}", config.model, config.precision, config.loss_scale);
  const RunResult result =
      run_with_progress(config, *task, info, config.out, {team, nullptr, checkpoints});
  if (config.part.rank > 0) {
    return !result.alarm.empty() ? kGaveUp : result.interrupted ? kInterrupted : 0;
  }

  const TrainConfig last = result.escaped.empty() ? config : in_precision(config, config.escape);
  print("{} in {}, loss scale {}: {} of {} steps{}{}\n", config.model, last.precision,
        last.loss_scale, result.steps.size(), config.steps,
        team != nullptr ? fmt::format(" on {} ranks", config.part.ranks) : "",
        result.interrupted ? ", then stopped by hand" : "");
  print_fact("loss", "{:.6g}", result.score.loss);
  print_fact(result.metric_name, "{:.4f}", result.score.metric);
  if (!result.escaped.empty()) print_fact("escaped", "{}", result.escaped);
  if (!config.inject.empty()) {
    print_fact("faults injected", "{}{}", result.injected,
               team != nullptr ? " in the first rank" : "");
  }
  print_fact("skipped steps", "{}", result.skipped);
  if (last.policy().retries()) print_fact("retries", "{}", result.retries);
  print_fact("final scale", "{}", scale_number(result.final_scale));
  print_fact("gradients lost", "{}", percent(result.lost));
  print_bounds(result, last.precision);
  print_fact("time", "{:.1f} s, {:.4g} steps/s", result.seconds,
             static_cast<double>(result.steps.size()) / std::max(result.seconds, 1e-9));
  std::vector<std::string> not_written;
  const auto attempt = [&](const auto& write) {
    try {
      write();
    } catch (const std::exception& error) {
      not_written.emplace_back(error.what());
    }
  };
  if (!config.out.empty()) {
    attempt([&] { draw(config, result); });
    attempt([&] {
      write_report(config.out);
      print_fact("report", "{}/report.html", config.out);
    });
    attempt([&] { print_advice(config.out); });
  }
  if (result.interrupted) print_how_to_resume(config);
  return report_end(result, not_written);
}

int train(CLI::App& command, TrainConfig& config) {
  const Launch launch = launch_from_environment();
  config.part = {launch.rank, launch.size};
  if (config.watch && config.out.empty()) config.out = "headroom-train";
  std::optional<Checkpoints> checkpoints;
  try {
    if (config.resume) open_to_resume(command, config, &checkpoints);
    resolve(&config);
    if (launch.several() && config.threads == 0) {
      const auto cores = static_cast<int>(std::thread::hardware_concurrency());
      config.threads = std::max(1, cores / launch.local_size);
    }
    if (config.resume) checkpoints->resume(&config);
  } catch (const Error&) {
    if (launch.first()) throw;
    return kBadInput;  // the first rank reports it
  }
  if (!config.resume && !config.out.empty()) checkpoints.emplace(config.out, launch.first());
  Checkpoints* const saved = checkpoints.has_value() ? &*checkpoints : nullptr;
  if (!launch.several()) return train(config, saved, nullptr);
  if (!launch.first()) config.layers = 0;  // all ranks have the same gradients
  std::unique_ptr<Team> team;
  try {
    team =
        make_team(launch, std::chrono::milliseconds(static_cast<int64_t>(config.timeout * 1000.0)));
    return train(config, saved, team.get());
  } catch (const std::exception& error) {
    const auto* const known = dynamic_cast<const Error*>(&error);
    const bool ranks = known != nullptr && (known->code() == ErrorCode::kRankLost ||
                                            known->code() == ErrorCode::kRanksDiffer);
    print_error(fmt::format("headroom: rank {}: {}\n", launch.rank, error.what()));
    std::fflush(nullptr);
    const int code = ranks ? kRankLost : kBadInput;
    if (team != nullptr) team->abort(code);
    return code;
  }
}

}  // namespace

void add_training_options(CLI::App& command, TrainConfig* config) {
  command
      .add_option(
          "--data", config->data,
          "training data: a PNG (field), a text file (lm, gpt), a folder of IDX files (mlp, cnn) "
          "(default: built in)")
      ->type_name("PATH");
  command.add_option(
      "--opt-level", config->opt_level,
      "O0: FP32, O1: autocast, O2: 16-bit model, FP32 masters and normalization layers, "
      "O3: all 16-bit (default: O1, for fp32 O0)");
  command.add_option("--optimizer", config->optimizer, "sgd, adam or adamw (default: the model's)");
  command
      .add_option("--state", config->state,
                  "full, half or byte: how the optimizer stores masters and moments")
      ->capture_default_str();
  command.add_option("--lr", config->lr, "learning rate (default: the model's)");
  command.add_option("--schedule", config->schedule, "cosine or constant (default: the model's)");
  command.add_option("--clip", config->clip, "clip gradients to this norm (default: no clipping)");
  command.add_option("--steps", config->steps, "steps to train (default: the model's)");
  command.add_option("--batch", config->batch, "samples in a batch (default: the model's)");
  command
      .add_option("--accumulate", config->accumulate,
                  "batches whose gradients are accumulated for one step")
      ->capture_default_str();
  command.add_option("--fake-quant", config->fake_quant,
                     "int8: train with fake-quantized linear layers (default: none)");
  command.add_option("--width", config->width, "width of the layers (default: the model's)");
  command.add_option("--depth", config->depth,
                     "number of hidden layers or blocks (default: the model's)");
  command.add_option("--context", config->context, "context length of gpt in bytes (default: 64)");
  command.add_option("--device", config->device, "cpu or cuda")->capture_default_str();
  command.add_option("--layers", config->layers,
                     "steps between snapshots of the gradients of every layer; 0: none "
                     "(default: 10 or more)");
  command.add_flag("--tensorboard", config->tensorboard, "also write event files for TensorBoard");
  command.add_option("--seed", config->seed, "seed of weights and batches")
      ->check(not_negative)
      ->capture_default_str();
  command.add_option("--threads", config->threads, "CPU threads (default: all)");
}

void add_train(CLI::App& app, Action* action) {
  const auto config = std::make_shared<TrainConfig>();
  CLI::App* const command = app.add_subcommand("train", kAboutTrain);
  command->add_option("--model,model", config->model, "field, lm, mlp, cnn or gpt")
      ->capture_default_str();
  command->add_option("--precision", config->precision, "fp16, bf16 or fp32")
      ->capture_default_str();
  command->add_option(
      "--loss-scale", config->loss_scale,
      "none, static:S, or a preset that 'headroom policies' lists (default: headroom for fp16, "
      "otherwise none)");
  command->add_option(
      "--out", config->out,
      "folder for history, report, plots and checkpoints (default: nothing is written)");
  command->add_flag("--resume", config->resume,
                    "resume the run in --out from its newest valid checkpoint; omitted settings "
                    "are taken from that run");
  command->add_option("--checkpoint-every", config->checkpoint_every,
                      "steps between checkpoints in --out; 0: none (default: a tenth of the run)");
  command->add_option("--inject", config->inject,
                      "faults to inject into the gradients: overflow:p=0.01,nan:step=5,tensor=NAME "
                      "(docs/reliability.md; default: none)");
  command->add_option("--inject-seed", config->inject_seed, "seed of the injected faults")
      ->check(not_negative)
      ->capture_default_str();
  command->add_option(
      "--escape", config->escape,
      "when no loss scale helps, return to a checkpoint and continue in bf16 or fp32 "
      "(default: stop)");
  CLI::Option* const watch =
      command->add_flag("--watch", config->watch,
                        "serve the live report on 127.0.0.1 (--out defaults to headroom-train)");
  command->add_option("--port", config->port, "port for --watch (default: a free one)")
      ->check(CLI::Range(0, 65535))
      ->needs(watch);
  command
      ->add_option("--timeout", config->timeout,
                   "seconds to wait for other ranks, under mpirun or torchrun")
      ->capture_default_str();
  add_training_options(*command, config.get());
  command->callback([=] { *action = [=] { return train(*command, *config); }; });
}

}  // namespace headroom::cli
