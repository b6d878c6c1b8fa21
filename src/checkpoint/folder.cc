#include <headroom/checkpoint.h>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>

#include "checkpoint/format.h"
#include "core/check.h"
#include "files/write.h"

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "checkpoint-";
constexpr const char* kSuffix = ".safetensors";
constexpr const char* kTemporary = ".tmp";  // see files::replace_file()

// Six digits or more, so that the files of most runs sort by name.
std::string file_name(int64_t step) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%06lld", static_cast<long long>(step));
  return std::string(kPrefix) + digits + kSuffix;
}

// The step in a checkpoint's file name; -1 for other names.
int64_t step_in(const std::string& name) {
  const size_t digits = std::string(kPrefix).size();
  const size_t end = name.find_first_not_of("0123456789", digits);
  if (!name.starts_with(kPrefix) || end == std::string::npos || name.substr(end) != kSuffix) {
    return -1;
  }
  return internal::step_of(name.substr(digits, end - digits));
}

}  // namespace

// The folder, its lock and the steps that must not be deleted.
struct CheckpointFolder::Place {
  Place(const std::string& path, FolderUse use) : folder(path) {
    if (use == FolderUse::kOwn) lock.emplace((fs::path(path) / "checkpoint.lock").string());
  }
  void check_owned() const {
    internal::require(lock.has_value(), ErrorCode::kWrongOrder, [&] {
      return "The folder '" + folder + "' was opened for reading only; open it with kOwn to save.";
    });
  }

  std::string path_of(int64_t step) const { return (fs::path(folder) / file_name(step)).string(); }

  // File names that begin like those of checkpoints, including temporary files.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      std::string name = entry->path().filename().string();
      if (name.starts_with(kPrefix)) found.push_back(std::move(name));
    }
    internal::require(!error, ErrorCode::kFile, [&] {
      return "The folder '" + folder + "' cannot be read: " + error.message() + ".";
    });
    return found;
  }
  // The steps of all checkpoints, newest first.
  std::vector<int64_t> steps() const {
    std::set<int64_t, std::greater<>> found;
    for (const std::string& name : names()) {
      // Compare the whole name: "checkpoint-7.safetensors" is not ours.
      if (name == file_name(step_in(name))) found.insert(step_in(name));
    }
    return {found.begin(), found.end()};
  }
  void remove_all_but(const std::set<int64_t>& kept) const {
    for (const int64_t step : steps()) {
      std::error_code ignored;  // a checkpoint too many does no harm
      if (!kept.contains(step)) fs::remove(path_of(step), ignored);
    }
  }

  std::string folder;
  std::optional<files::GrowingFile> lock;  // an empty file, locked while the folder is owned
  int64_t last = -1;                       // the step last saved or loaded
  int64_t before = -1;                     // the older step that is kept as well
};

CheckpointFolder::CheckpointFolder(const std::string& folder, FolderUse use) {
  if (use == FolderUse::kOwn) files::make_folders(folder);
  place_ = std::make_unique<Place>(folder, use);
  if (use == FolderUse::kRead) return;
  // Remove temporary files of a run that was killed while it saved.
  for (const std::string& name : place_->names()) {
    std::error_code ignored;
    if (name.ends_with(kTemporary)) fs::remove(fs::path(folder) / name, ignored);
  }
}

CheckpointFolder::~CheckpointFolder() = default;
CheckpointFolder::CheckpointFolder(CheckpointFolder&&) noexcept = default;
CheckpointFolder& CheckpointFolder::operator=(CheckpointFolder&&) noexcept = default;

const std::string& CheckpointFolder::folder() const { return place_->folder; }

void CheckpointFolder::save(int64_t step, const std::vector<CheckpointTensor>& tensors,
                            const std::string& state) {
  place_->check_owned();
  const std::string header = internal::checkpoint_header(step, tensors, state);
  std::vector<std::string_view> pieces = {header};
  for (const CheckpointTensor& item : tensors) pieces.push_back(internal::bytes_of(item.tensor));
  files::replace_file(place_->path_of(step), pieces, files::Sync::kYes);
  // The new checkpoint is safe on the disk. Only now may older ones be deleted.
  if (place_->last < step) place_->before = place_->last;
  // After a return to an older checkpoint, a newer one belongs to an abandoned continuation.
  if (place_->before > step) place_->before = -1;
  place_->remove_all_but({step, place_->before});
  place_->last = step;
}

Checkpoint CheckpointFolder::load(const std::function<void(const Checkpoint&)>& take,
                                  std::vector<std::string>* skipped) {
  for (;;) {
    const std::vector<int64_t> steps = place_->steps();
    std::vector<std::string> reasons;
    const auto report_skipped = [&] {
      if (skipped != nullptr) skipped->insert(skipped->end(), reasons.begin(), reasons.end());
    };
    for (size_t i = 0; i < steps.size(); ++i) {
      bool reading = true;
      try {
        Checkpoint checkpoint = Checkpoint::read(place_->path_of(steps[i]));
        internal::require(checkpoint.step() == steps[i], ErrorCode::kBadState, [&] {
          return "'" + checkpoint.path() + "' is of step " + std::to_string(checkpoint.step()) +
                 ", not of the step in its name.";
        });
        reading = false;
        if (take != nullptr) take(checkpoint);
        place_->last = steps[i];
        place_->before = i + 1 < steps.size() ? steps[i + 1] : -1;
        report_skipped();
        return checkpoint;
      } catch (const Error& error) {
        // A checkpoint that cannot be read counts as damaged; an I/O error in `take` does not.
        const bool damaged =
            error.code() == ErrorCode::kBadState || (error.code() == ErrorCode::kFile && reading);
        if (!damaged) {
          report_skipped();
          throw;
        }
        reasons.emplace_back(error.what());
      }
    }
    // If the owner has saved newer checkpoints and deleted these meanwhile, search again.
    if (steps != place_->steps()) continue;
    report_skipped();
    // One sentence for the folder, then one for each checkpoint that failed.
    std::string sentence = "There is no good checkpoint in '" + place_->folder + "'";
    for (size_t i = 0; i < reasons.size(); ++i) sentence += (i == 0 ? ": " : " ") + reasons[i];
    throw Error(ErrorCode::kBadState, sentence + (reasons.empty() ? "." : ""));
  }
}

void CheckpointFolder::clear() {
  place_->check_owned();
  place_->remove_all_but({});
  place_->last = -1;
}

}  // namespace headroom
