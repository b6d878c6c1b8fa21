// A scaler whose scale, counters and verdicts are on a CUDA device. Everything enqueues on the
// current stream and returns, unless its name says that it waits.
#ifndef HEADROOM_SRC_SCALER_CUDA_H_
#define HEADROOM_SRC_SCALER_CUDA_H_

#include <optional>

#include "agree/agree.h"
#include "apply/cuda.h"
#include "core/cuda.h"
#include "decide/transition.h"
#include "decide/verdict.h"
#include "measure/cuda.h"

namespace headroom::internal {

/// A scale that a framework's own scaler maintains, for a disabled GradScaler. Every pointer may be
/// null. On a CUDA device they are device pointers, which are read and written when the step runs.
struct ExternalScale {
  const float* scale = nullptr;      // the gradients are divided by it
  const float* found_inf = nullptr;  // not 0: skip the step

  bool given() const { return scale != nullptr || found_inf != nullptr; }
};

/// The message of the ranks about an optimizer's gradients, and its result.
struct CudaAgreement {
  Message message;
  GradStats stats;
  bool same_names;  // the ranks' tensors have the same names
  bool differ;      // the ranks are out of step or have drifted apart: the step is skipped
};

/// In which field the ranks differ, for difference_sentence().
struct CudaDifference {
  int field;
  double low, high;
};

/// The ranks and the host's part of this rank's status; null without ranks.
struct CudaRanks {
  Ranks* ranks = nullptr;
  RankStatus status;
};

/// The result of a step.
struct CudaReport {
  int64_t steps;    // of this optimizer so far,
  int64_t skipped;  // of which skipped
  float scale;
  Verdict verdict;
  GradStats stats;
  bool same_names;
};

/// An alarm raised by an update.
struct CudaAlarm {
  Alarm alarm;
  float scale;
  int64_t skips_in_row;
};

/// The last few values that kernels have sent to the host, in pinned memory. A kernel writes a slot
/// and then `latest`; the host polls `latest` without waiting.
template <typename T>
struct CudaMail {
  static constexpr uint64_t kSlots = 4;
  uint64_t latest;  // number of values so far; value n (from 1) is in slot n % kSlots
  T slots[kSlots];
};

/// The host's side of a CudaMail, with its memory.
template <typename T>
class CudaMailbox {
 public:
  CudaMailbox() : memory_(sizeof(CudaMail<T>)) {}
  CudaMail<T>* data() const { return memory_.as<CudaMail<T>>(); }
  uint64_t latest() const;
  std::optional<T> read() const;  // the latest value; none before the first

 private:
  CudaHostBuffer memory_;
};

/// The state of the scaler on the device.
struct CudaScale {
  ScaleRecord record;
  float inverse;   // 1 / scale
  float factor;    // the scale divided by the one before the last change
  StepSeen seen;   // input of the next update
  int64_t alarms;  // numbers of values sent so far
  int64_t messages;
  int64_t differences;
};

/// The state of an optimizer under the scaler, on the device.
struct CudaProgress {
  GradStats unscaled;  // result of the last unscale_()
  StepNumbers numbers;
  bool unscaled_same_names;
  int64_t steps;
  int64_t skipped;
  DeviceVerdict verdict;  // of the last step
};

/// The host's part of a step.
struct CudaStep {
  NormLimits limits;
  ExternalScale external;
  bool enabled = true;
  bool unscaled = false;  // the gradients are unscaled already
};

/// An optimizer under a scaler on a device.
class CudaOptimizer {
 public:
  explicit CudaOptimizer(int device);
  CudaProgress* progress() const { return progress_.data(); }

  /// The statistics of this rank's gradients on the device, after measure_gradients().
  const GradStats* measured() const { return measure_.stats(); }

  /// The statistics of its gradients on the device, over all ranks.
  const GradStats* found() const {
    return agreement.data() != nullptr ? &agreement.data()->stats : measured();
  }

  /// The gradients from now on, and copies of gradients that another rank counts.
  void set_lists(const std::vector<TensorView>& grads, const std::vector<TensorView>& copies);

  /// Enqueues one read of all gradients, or zeros for them; see CudaMeasure.
  void measure_gradients(const MeasureJob& job);
  void clear(const bool* keep);

  CudaArray<CudaAgreement> agreement;  // empty without ranks
  CudaMailbox<CudaReport> reports;

 private:
  CudaArray<CudaProgress> progress_;
  CudaMeasure measure_;
  std::optional<CudaMeasure> copies_;
};

/// The scaler's kernels and their state. The host calls it in the order that CallOrder allows.
class CudaScaler {
 public:
  explicit CudaScaler(int device);
  int device() const { return device_; }

  /// Replaces policy and state, and waits. `factor`: the new scale divided by the old one.
  void set_record(const ScaleRecord& record, float factor);
  ScaleNumbers wait_numbers() const;
  StepSeen wait_seen() const;

  /// out = loss x scale.
  void scale(const TensorView& loss, const TensorView& out);
  float* scale_address() const;

  /// Unscales the gradients.
  void unscale(const CudaRanks& ranks, CudaOptimizer* optimizer);

  /// Decides by what optimizer->measure_gradients() found, and prepares the optimizer's tables for
  /// the step. The tables are empty for optimizers other than ours.
  void decide(const CudaStep& step, const CudaTables& tables, const CudaRanks& ranks,
              CudaOptimizer* optimizer);

  void update();

  /// Counts a step as overflowed that the host has skipped.
  void count_overflow();

  /// Multiplies waiting gradients by CudaScale::factor, or by the scale if they are unscaled.
  void rescale(bool unscaled, CudaOptimizer* optimizer);

  CudaMailbox<CudaAlarm> alarms;
  CudaMailbox<CudaDifference> differences;

 private:
  void agree(bool enabled, const CudaRanks& ranks, CudaOptimizer* optimizer);

  int device_;
  CudaArray<CudaScale> scale_;
};

/// out = loss x scale, for tensors on a CUDA device and a scale on the host.
void cuda_scale(const TensorView& loss, float scale, const TensorView& out);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_SCALER_CUDA_H_
