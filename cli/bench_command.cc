#include <fmt/format.h>
#include <headroom/error.h>
#include <headroom/runtime.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/train/step_bench.h"

namespace headroom::cli {
namespace {

struct BenchOptions {
  bench::Settings settings;
  bool json = false;
  bool libtorch = false;
};

int bench_libtorch(const BenchOptions& options) {
  bool first = true;
  run_step_bench(options.settings.repetitions, [&](const StepFigure& figure) {
    if (first && !options.json) {
      print("{:<30}{:>10}{:>10}{:>9}   {}\n", "", "ours, ms", "theirs", "ratio", "theirs is");
    }
    first = false;
    if (options.json) {
      const nlohmann::ordered_json object = {
          {"name", figure.name}, {"ours_ms", figure.ours}, {"theirs_ms", figure.theirs}};
      print("{}\n", json_text(object));
    } else {
      const double ratio = figure.theirs / figure.ours;
      print("{:<30}{:>10.3f}{:>10.3f}{:>9}   {}\n", figure.name, figure.ours, figure.theirs,
            ratio < 20.0 ? fmt::format("{:.1f}x", ratio) : fmt::format("{:.2f} %", 100.0 / ratio),
            figure.theirs_is);
    }
    flush_or_stop();
  });
  return 0;
}

int bench(const BenchOptions& options) {
  if (options.libtorch) return bench_libtorch(options);
  bool any = false;
  bench::run(options.settings, [&](const bench::Figure& figure) {
    if (!any && !options.json) {
      print("SIMD target {}; one thread unless named; medians of {} repetitions\n\n", simd_target(),
            options.settings.repetitions);
      print("{:<28}{:>9}{:>9}{:>10}   {}\n", "", "GB/s", "floor", "of floor", "floor is");
    }
    any = true;
    if (options.json) {
      const nlohmann::ordered_json object = {{"name", figure.name},
                                             {"gbps", figure.gbps},
                                             {"floor_gbps", figure.floor_gbps},
                                             {"of_floor", figure.of_floor()}};
      print("{}\n", json_text(object));
    } else {
      print("{:<28}{:>9.1f}{:>9.1f}{:>9.0f}%   {}\n", figure.name, figure.gbps, figure.floor_gbps,
            100.0 * figure.of_floor(), figure.floor);
    }
    flush_or_stop();
  });
  if (!any) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("No figure has '{}' in its name; run bench without --filter to see them.",
                    options.settings.filter));
  }
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Action* action) {
  auto* command = app.add_subcommand("bench", "Time the kernels beside the speed of memory");
  const auto options = std::make_shared<BenchOptions>();
  command->add_flag("--json", options->json, "one JSON object per line");
  CLI::Option* const libtorch =
      command->add_flag("--libtorch", options->libtorch,
                        "compare whole steps through LibTorch with its own calls instead");
  command
      ->add_option("--filter", options->settings.filter,
                   "only figures whose name contains this (default: all)")
      ->excludes(libtorch);
  command
      ->add_option("--megabytes", options->settings.megabytes,
                   "size of the memory that a figure reads or writes")
      ->check(CLI::Range(64, 1 << 20))
      ->excludes(libtorch)
      ->capture_default_str();
  command
      ->add_option("--repetitions", options->settings.repetitions, "repetitions to take medians of")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->callback([action, options] { *action = [options] { return bench(*options); }; });
}

}  // namespace headroom::cli
