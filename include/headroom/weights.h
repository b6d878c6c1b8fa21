// weights: whether the weights of a checkpoint are safe in FP16, before the first step. Part of
// headroom::tools; docs/inspect.md has the command and the reasons for the bounds.
#ifndef HEADROOM_WEIGHTS_H_
#define HEADROOM_WEIGHTS_H_

#include <headroom/export.h>
#include <headroom/inspect.h>
#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// One tensor of weights, or the total of all, and what a conversion to FP16 does to it.
struct WeightTensor {
  std::string file;  // path; empty for tensors in memory
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t count = 0;
  int64_t zeros = 0;
  int64_t infs = 0;
  int64_t nans = 0;
  double largest = 0.0;   // magnitude of the finite weights
  double smallest = 0.0;  // likewise, without zeros
  Outcome fp16;           // of the finite weights other than zero

  /// Elements that are neither zero, inf nor NaN.
  int64_t nonzero() const { return count - zeros - infs - nans; }
};

/// A tensor that is not of f16, bf16, f32 or f64, and was not inspected.
struct LeftOutWeights {
  std::string file;
  std::string name;
  std::string dtype;
  int64_t count = 0;  // of elements; 0 if unknown
};

/// What FP16 would do to the weights of a checkpoint.
struct WeightReport {
  /// False if a weight overflows, if there is inf or NaN, if more than `lose` of the nonzero
  /// weights of a tensor become zero, or if not all weights could be judged.
  bool safe = true;
  bool complete = true;  // false if a floating-point tensor was left out because of its type
  std::string verdict;   // in one sentence, with what to do

  std::vector<WeightTensor> tensors;   // in the order in which they were added
  std::vector<size_t> worst_first;     // indices of all tensors, by what they lose
  std::vector<std::string> keep_fp32;  // names of tensors that FP16 damages, the worst first
  WeightTensor total;
  std::vector<LeftOutWeights> left_out;
  double lose = 0.0;

  /// A table and the verdict, as `headroom inspect --weights` prints it: the 20 tensors that lose
  /// most, or all. Control characters in names are replaced.
  HEADROOM_API std::string to_string(int width = 80, bool all = false) const;
};

/// Collects the tensors of a report. Weights are read once, with several threads if they are large.
///
///     WeightInspector inspector;
///     inspector.add_files({"model.safetensors.index.json"});
///     WeightReport report = inspector.finish();
class HEADROOM_API WeightInspector {
 public:
  /// `lose` is the share of a tensor's nonzero weights that may become zero. Throws
  /// Error(kInvalidArgument) unless it is from 0 to 1.
  explicit WeightInspector(double lose = 0.01);
  ~WeightInspector();

  /// Weights in host memory.
  void add(const std::string& name, const TensorView& weights, std::vector<int64_t> shape = {});
  /// A tensor that cannot be judged. The report is incomplete if its type is a floating-point one.
  void leave_out(const std::string& name, const std::string& dtype, int64_t count = 0);

  /// Safetensors files; indices of shards (*.safetensors.index.json), which stand for their shards;
  /// and folders, which stand for their index or else for all their safetensors files. A file that
  /// is given twice is read once. Memory use does not depend on the size of the files. `progress`,
  /// if given, is called from several threads with the number of bytes read so far and of all.
  /// Throws Error(kFile) if a file cannot be read and Error(kBadState) if it is invalid.
  void add_files(const std::vector<std::string>& paths,
                 const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr);

  /// Throws Error(kInvalidArgument) if nothing was added.
  WeightReport finish();

 private:
  struct Collected;
  std::unique_ptr<Collected> collected_;
};

}  // namespace headroom

#endif  // HEADROOM_WEIGHTS_H_
