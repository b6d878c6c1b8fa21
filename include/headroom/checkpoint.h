// checkpoint: the state of a run on disk, whole or not at all. docs/reliability.md has the format.
#ifndef HEADROOM_CHECKPOINT_H_
#define HEADROOM_CHECKPOINT_H_

#include <headroom/export.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// A tensor of a checkpoint, on the CPU.
struct CheckpointTensor {
  std::string name;
  TensorView tensor;
  std::vector<int64_t> shape = {};  // for other readers; empty: one dimension
};

/// A checkpoint that was read to memory and is as it was written. Copies share that memory. Any
/// number of threads may read it.
class HEADROOM_API Checkpoint {
 public:
  const std::string& path() const { return path_; }
  int64_t step() const { return step_; }
  const std::string& state() const { return state_; }  // what save() was given

  /// Views of this checkpoint's memory, in the order of save(): valid as long as it or a copy is.
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

enum class FolderUse : uint8_t {
  kOwn,   // for the run that saves there
  kRead,  // for others that load what it has saved, its other ranks for example
};

/// The checkpoints of one run: `checkpoint-000123.safetensors` in a folder, the newest two of them.
///
///     CheckpointFolder checkpoints("runs/a");
///     checkpoints.save(step, {{"w", hr::view(w)}, {"w/exp_avg", moment}}, scaler.save());
///     ...
///     const Checkpoint newest = checkpoints.load();
///     scaler.load(newest.state());
///
/// A crash, a kill or a full disk at any moment leaves the checkpoints that were complete before:
/// a new one is written under another name, synced, and then renamed. Each has a checksum over all
/// its bytes, so that one that was cut or changed is never taken for good.
///
/// One CheckpointFolder at a time, in all processes, may own a folder; any number may read it. One
/// thread at a time may use it. Errors are Error(kFile) with the file's name, unless a function
/// says otherwise.
class HEADROOM_API CheckpointFolder {
 public:
  /// Makes the folder and its parents, and removes what a killed run left half-written. With
  /// FolderUse::kRead nothing is changed, now or later: save() and clear() throw
  /// Error(kWrongOrder).
  explicit CheckpointFolder(const std::string& folder, FolderUse use = FolderUse::kOwn);
  ~CheckpointFolder();
  CheckpointFolder(CheckpointFolder&&) noexcept;
  CheckpointFolder& operator=(CheckpointFolder&&) noexcept;

  const std::string& folder() const;

  /// Writes a checkpoint and waits until it is safe on the disk. Then all others are deleted but
  /// the one that was saved or loaded before it. `state` is text in UTF-8 of any kind, such as
  /// JSON. Names are UTF-8, and none is there twice. If it throws, all is as it was.
  void save(int64_t step, const std::vector<CheckpointTensor>& tensors, const std::string& state);

  /// The newest checkpoint that is good. `take` looks at it and may use it; if it throws
  /// Error(kBadState), the checkpoint is taken for damaged too. Why newer ones were not good is put
  /// in `skipped`, a sentence each. Throws Error(kBadState) with these sentences if none is good.
  Checkpoint load(const std::function<void(const Checkpoint&)>& take = nullptr,
                  std::vector<std::string>* skipped = nullptr);

  /// Deletes all checkpoints.
  void clear();

 private:
  struct Place;
  std::unique_ptr<Place> place_;
};

}  // namespace headroom

#endif  // HEADROOM_CHECKPOINT_H_
