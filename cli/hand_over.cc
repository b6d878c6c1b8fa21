// Replaces this process by headroom-train for the commands that need LibTorch. They are in a
// separate program because loading LibTorch and its hundreds of libraries takes half a second.
#include <headroom/error.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/hand_over.h"
#include "cli/program.h"
#include "cli/train/step_bench.h"

namespace headroom::cli {
namespace {

#ifdef HEADROOM_HAS_LIBTORCH
constexpr bool kHasTrainer = true;
#else
constexpr bool kHasTrainer = false;
#endif

std::vector<std::string>& trainer_arguments() {
  static std::vector<std::string> arguments;
  return arguments;
}

// Executes headroom-train with the same arguments. Does not return on success.
int execute_trainer() {
  if constexpr (!kHasTrainer) {
    throw Error(
        ErrorCode::kUnsupported,
        "train, compare and bench --libtorch need LibTorch, which this build lacks. In a clone "
        "of Headroom, use ./run train, which builds with it.");
  }
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string trainer = (self.parent_path() / "headroom-train").string();
  // GNU OpenMP's threads spin for milliseconds at barriers by default, which on a busy machine
  // takes time from the threads they wait for.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  std::vector<std::string> arguments = trainer_arguments();
  arguments.insert(arguments.begin(), called_as());
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv(trainer.c_str(), pointers.data());
  throw Error(ErrorCode::kFile, "'" + trainer + "' could not be started: " + std::strerror(errno) +
                                    ". It is part of this program; reinstall both.");
}

void add(const char* name, const char* about, CLI::App& app, Action* action) {
  app.add_subcommand(name, kHasTrainer ? about : "Not in this build: it needs LibTorch")
      ->callback([action] { *action = execute_trainer; });
}

}  // namespace

void hand_over_arguments(std::vector<std::string> arguments) {
  trainer_arguments() = std::move(arguments);
}

void add_train(CLI::App& app, Action* action) { add("train", kAboutTrain, app, action); }
void add_compare(CLI::App& app, Action* action) { add("compare", kAboutCompare, app, action); }
void run_step_bench(int, const std::function<void(const StepFigure&)>&) { execute_trainer(); }

}  // namespace headroom::cli
