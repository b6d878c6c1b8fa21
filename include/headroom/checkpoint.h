// checkpoint: atomic checkpoints of a run on disk. docs/reliability.md describes the format.
#ifndef HEADROOM_CHECKPOINT_H_
#define HEADROOM_CHECKPOINT_H_

#include <headroom/export.h>
#include <headroom/owned.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// A tensor of a checkpoint, in host memory.
struct CheckpointTensor {
  std::string name;
  TensorView tensor;
  std::vector<int64_t> shape = {};  // for other readers; empty: one dimension
};

/// A checkpoint that was read into memory and verified. Copies share the memory. Thread-safe for
/// reading.
class HEADROOM_API Checkpoint {
 public:
  /// The file, the step that it was saved at, and the user's text.
  const std::string& path() const { return path_; }
  int64_t step() const { return step_; }
  const std::string& state() const { return state_; }  // the text that was passed to save()

  /// Views of this checkpoint's memory, in the order of save(), valid as long as it or a copy
  /// exists.
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  const CheckpointTensor* find(const std::string& name) const;  // null if there is none

 private:
  friend class CheckpointFolder;
  static Checkpoint read(const std::string& path);

  std::string path_;
  int64_t step_ = 0;
  std::string state_;
  std::vector<CheckpointTensor> tensors_;
  std::shared_ptr<const char> memory_;
};

/// Whether a CheckpointFolder locks its folder.
enum class FolderUse : uint8_t {
  kOwn,   // for the run that saves checkpoints
  kRead,  // for processes that only load them, such as other ranks
};

/// The checkpoints of one run: `checkpoint-000123.safetensors` in a folder, the newest two of them.
///
///     CheckpointFolder checkpoints("runs/a");
///     checkpoints.save(step, {{"w", hr::view(w)}, {"w/exp_avg", moment}}, scaler.save());
///     ...
///     const Checkpoint newest = checkpoints.load();
///     scaler.load(newest.state());
///
/// A crash, a kill or a full disk at any time leaves the earlier checkpoints intact: a new one is
/// written under another name, synced, and then renamed. Each has a checksum over all its bytes, so
/// that a truncated or modified file is never accepted.
///
/// Only one CheckpointFolder in all processes may own a folder; any number may read it. Not
/// thread-safe. Errors are Error(kFile) with the file's name, unless a function says otherwise.
class HEADROOM_API CheckpointFolder {
 public:
  /// Creates the folder and its parents, and removes partial files of a killed run. With
  /// FolderUse::kRead nothing is ever changed: save() and clear() throw Error(kWrongOrder).
  explicit CheckpointFolder(const std::string& folder, FolderUse use = FolderUse::kOwn);
  ~CheckpointFolder();
  CheckpointFolder(CheckpointFolder&&) noexcept;
  CheckpointFolder& operator=(CheckpointFolder&&) noexcept;

  /// The path of the folder.
  const std::string& folder() const;

  /// Writes a checkpoint and waits until it is synced to disk. Then deletes all others except the
  /// one that was saved or loaded before it, and that one too if it is newer, because it then
  /// belongs to an abandoned continuation. `state` is any UTF-8 text, such as JSON. Names are UTF-8
  /// and unique. If it throws, nothing has changed.
  void save(int64_t step, const std::vector<CheckpointTensor>& tensors, const std::string& state);

  /// The newest valid checkpoint. `take` may inspect and use it; if `take` throws Error(kBadState),
  /// the checkpoint counts as damaged and the next older one is tried. `skipped` receives a
  /// sentence for each checkpoint that was not valid. Throws Error(kBadState) with these sentences
  /// if there is no valid one.
  Checkpoint load(const std::function<void(const Checkpoint&)>& take = nullptr,
                  std::vector<std::string>* skipped = nullptr);

  /// Deletes all checkpoints.
  void clear();

 private:
  struct Place;
  internal::Owned<Place> place_;
};

}  // namespace headroom

#endif  // HEADROOM_CHECKPOINT_H_
