// LibTorch brings hundreds of libraries, which take half a second to load. So the commands that
// need it are in a program of their own beside this one, headroom-train, which takes over.
#include <headroom/error.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/train/step_bench.h"

namespace headroom::cli {
namespace {

#ifdef HEADROOM_HAS_LIBTORCH
constexpr bool kHasTrainer = true;
#else
constexpr bool kHasTrainer = false;
#endif

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

// This process becomes the other program, with the same arguments.
int hand_over() {
  if constexpr (!kHasTrainer) {
    throw Error(ErrorCode::kUnsupported,
                "This build of headroom was made without LibTorch, which this needs; install "
                "libtorch-dev and build again.");
  }
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string trainer = (self.parent_path() / "headroom-train").string();
  // Threads that wait for each other spin, by GNU OpenMP's default for milliseconds, which on a
  // busy machine they take from those they wait for.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  std::vector<std::string> arguments = own_arguments();
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv(trainer.c_str(), pointers.data());
  throw Error(ErrorCode::kFile, "'" + trainer + "' could not be started: " + std::strerror(errno) +
                                    ". It belongs to this program; install both again.");
}

void add(const char* name, const char* about, CLI::App& app, Action* action) {
  app.add_subcommand(name, kHasTrainer ? about : "Not in this build: it needs LibTorch")
      ->callback([action] { *action = hand_over; });
}

}  // namespace

void add_train(CLI::App& app, Action* action) { add("train", kAboutTrain, app, action); }
void add_compare(CLI::App& app, Action* action) { add("compare", kAboutCompare, app, action); }
void run_step_bench(int, const std::function<void(const StepFigure&)>&) { hand_over(); }

}  // namespace headroom::cli
