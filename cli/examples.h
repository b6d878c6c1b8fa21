// Examples for the help of every command. tests/cli/manners_test.py checks their options.
#ifndef HEADROOM_CLI_EXAMPLES_H_
#define HEADROOM_CLI_EXAMPLES_H_

#include <string>
#include <string_view>
#include <utility>

namespace headroom::cli {

inline constexpr std::pair<std::string_view, std::string_view> kExamples[] = {
    {"train",
     "  headroom train gpt --out runs/a                 FP16, policy headroom; runs/a/report.html\n"
     "  headroom train --out runs/a --resume            continue it after Ctrl-C or a crash\n"
     "  headroom train mlp --loss-scale torch --watch   torch's rule; live report in the browser\n"
     "  headroom train cnn --precision bf16 --opt-level O2\n"},
    {"compare",
     "  headroom compare                                field and lm; "
     "headroom-compare/report.html\n"
     "  headroom compare gpt --seeds 3 --out cmp\n"},
    {"report",
     "  headroom report runs/a                          writes runs/a/report.html\n"
     "  headroom report runs --watch                    live, for all runs below runs\n"},
    {"diagnose",
     "  headroom diagnose runs/a\n"
     "  headroom diagnose runs --json                   every run below runs, as JSON\n"},
    {"inspect",
     "  headroom inspect grads.npz                      which static scale?\n"
     "  headroom inspect grads.safetensors --format e4m3 --html page.html\n"
     "  headroom inspect --weights model.safetensors    is this checkpoint safe in FP16?\n"},
    {"policies", "  headroom policies\n"},
    {"replay",
     "  headroom replay runs/a/history.jsonl --policy headroom,torch,megatron\n"
     "  printf '0\\n1\\n0\\n' | headroom replay --policy torch --init-scale 1024 -\n"},
    {"state", "  python -m headroom state checkpoint.pt --to megatron\n"},
    {"doctor", "  python -m headroom doctor\n"},
    {"bench",
     "  headroom bench --filter adamw                   figures whose name contains adamw\n"
     "  headroom bench --libtorch                       whole steps, beside LibTorch's own "
     "calls\n"},
    {"completion", "  eval \"$(headroom completion bash)\"\n"},
};

/// "Examples:" and the examples of a command.
inline std::string examples_of(std::string_view command) {
  for (const auto& [name, text] : kExamples) {
    if (name == command) return "Examples:\n" + std::string(text);
  }
  return "";
}

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_EXAMPLES_H_
