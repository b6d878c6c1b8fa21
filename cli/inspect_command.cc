#include <headroom/error.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/inspect/inspection.h"
#include "cli/suggest.h"
#include "files/write.h"

namespace headroom::cli {
namespace {

constexpr double kLoseWeights = 0.01;  // unless --lose is given

// Refuses to overwrite an input file with the page.
void check_not_input(const InspectOptions& options) {
  for (const std::string& file : options.files) {
    std::error_code missing;
    if (std::filesystem::equivalent(options.html, file, missing)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "--html names '" + file + "', which is an input; choose another file for the page.");
    }
  }
}

int run(const InspectOptions& options) {
  if (options.weights) return inspect_weights(options);
  check_not_input(options);
  const Inspection inspection = scan(options);
  if (!options.html.empty()) files::write_to(options.html, html_page(inspection));
  options.json ? print_json(inspection) : print_table(inspection);
  return 0;
}

}  // namespace

void add_inspect(CLI::App& app, Action* action) {
  const auto options = std::make_shared<InspectOptions>();
  CLI::App* const command = app.add_subcommand(
      "inspect",
      "Show what a 16-bit format does to saved gradients, and recommend a scale; or say whether a "
      "checkpoint is safe in FP16 (--weights)");
  command
      ->add_option("files", options->files,
                   "gradients of f16, bf16, f32 or f64: safetensors, .npy, .npz; with --weights: "
                   "safetensors, *.safetensors.index.json, or a folder of them")
      ->required();
  CLI::Option* const weights =
      command->add_flag("--weights", options->weights,
                        "the files are a checkpoint: is it safe in FP16? Exits with 3 if it is "
                        "not, or if that is not known");
  command
      ->add_option("--format", options->format,
                   "format of the gradients in training: fp16, bf16, e5m2, e4m3")
      ->check(one_of({"fp16", "bf16", "e5m2", "e4m3"}))
      ->capture_default_str();
  command
      ->add_option(
          "--scale", options->scale,
          "show this scale (default: all powers of two, and tensors at the recommended one)")
      ->check([](const std::string& text) {
        float scale = 0.0f;
        const bool good =
            CLI::detail::lexical_cast(text, scale) && scale >= 0x1p-126f && scale <= 0x1p126f;
        return good ? std::string()
                    : "it is '" + text + "'; it must be a number from 2^-126 to 2^126.";
      });
  command
      ->add_option("--lose", options->lose,
                   "share of the nonzero gradients, or of a tensor's weights (then 0.01), that may "
                   "become zero")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command
      ->add_option("--tensor", options->patterns,
                   "only tensors whose name matches, such as 'layers.*.weight'; may be repeated "
                   "(default: all)")
      ->expected(1)
      ->take_all();
  command
      ->add_option("--as", options->as,
                   "bf16: interpret 16-bit integers and NumPy's V2 as bf16 (default: refuse them)")
      ->check(one_of({"bf16"}));
  command->add_flag("--all", options->all, "print every tensor and every power of two");
  command->add_flag("--json", options->json, "print everything as one JSON object");
  command->add_option("--html", options->html, "also write a page to this file (default: none)")
      ->type_name("FILE");
  for (const char* name : {"--format", "--scale", "--tensor", "--as", "--html"}) {
    weights->excludes(command->get_option(name));
  }
  command->callback([=] {
    if (options->weights && command->count("--lose") == 0) options->lose = kLoseWeights;
    *action = [options] { return run(*options); };
  });
}

}  // namespace headroom::cli
