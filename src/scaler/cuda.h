// A GradScaler whose scale, counters and verdicts live on a CUDA device. Everything here only
// enqueues, unless its name says that it waits.
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

/// A scale that somebody else keeps (a framework's own scaler), for a disabled GradScaler. All
/// pointers may be null; they are read and written when the step runs.
struct ExternalScale {
  const float* scale = nullptr;      // the gradients are divided by it
  const float* found_inf = nullptr;  // not 0: skip the step

  bool given() const { return scale != nullptr || found_inf != nullptr; }
};

/// What ranks send each other about an optimizer's gradients, and the result.
struct CudaAgreement {
  Message message;
  GradStats stats;
  bool same_names;  // the ranks' tensors have the same names
  bool differ;      // they are out of step, or have drifted apart
};

/// In what ranks differ, as in difference_sentence().
struct CudaDifference {
  int field;
  double low, high;
};

/// The ranks to ask, and the status of this one as far as the host knows it; alone: null.
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

/// An update has raised an alarm.
struct CudaAlarm {
  Alarm alarm;
  float scale;
  int64_t skips_in_row;
};

/// The last few values that a kernel sent to the host, which looks without waiting.
template <typename T>
struct CudaMail {
  static constexpr uint64_t kSlots = 4;
  uint64_t latest;  // counts from 1; value n is in slot n % kSlots
  T slots[kSlots];
};

template <typename T>
class CudaMailbox {
 public:
  CudaMailbox() : memory_(sizeof(CudaMail<T>)) {}
  CudaMail<T>* data() const { return memory_.as<CudaMail<T>>(); }
  uint64_t latest() const;
  std::optional<T> read() const;  // none if nothing came yet

 private:
  CudaHostBuffer memory_;
};

/// The scale, on the device.
struct CudaScale {
  ScaleRecord record;
  float inverse;   // 1 / scale
  float factor;    // the scale over the one before the last change
  StepSeen seen;   // in this round
  int64_t alarms;  // these so far
  int64_t messages;
  int64_t differences;
};

/// What the device keeps for an optimizer under the scaler.
struct CudaProgress {
  GradStats unscaled;  // found by the last unscale_
  StepNumbers numbers;
  bool unscaled_same_names;
  int64_t steps;
  int64_t skipped;
  DeviceVerdict verdict;  // of the last step
};

/// What the host knows of a step when it enqueues it.
struct CudaStep {
  NormLimits limits;
  ExternalScale external;
  bool enabled = true;
  bool unscaled = false;  // the gradients were unscaled already
};

/// An optimizer under a scaler on a device.
class CudaOptimizer {
 public:
  explicit CudaOptimizer(int device);
  CudaProgress* progress() const { return progress_.data(); }

  /// What the last read of this rank's gradients found.
  const GradStats* measured() const { return measure_.stats(); }

  /// What was found in its gradients, by all ranks if there are several.
  const GradStats* found() const {
    return agreement.data() != nullptr ? &agreement.data()->stats : measured();
  }

  /// The gradients from now on, and copies of gradients that another rank counts.
  void set_lists(const std::vector<TensorView>& grads, const std::vector<TensorView>& copies);

  /// Enqueues one read of all gradients; see CudaMeasure for these three.
  void measure_gradients(const MeasureJob& job, const float* factor = nullptr);
  void rescale(const float* factor);
  void clear(const bool* keep);

  CudaArray<CudaAgreement> agreement;  // null if there is one rank
  CudaMailbox<CudaReport> reports;

 private:
  CudaArray<CudaProgress> progress_;
  CudaMeasure measure_;
  std::optional<CudaMeasure> copies_;
};

class CudaScaler {
 public:
  explicit CudaScaler(int device);
  int device() const { return device_; }

  /// `factor`: the new scale over the old one.
  void set_record(const ScaleRecord& record, float factor);
  ScaleNumbers wait_numbers() const;
  StepSeen wait_seen() const;

  /// out = loss x scale.
  void scale(const TensorView& loss, const TensorView& out);
  float* scale_address() const;

  /// Unscales the optimizer's gradients.
  void unscale(const CudaRanks& ranks, CudaOptimizer* optimizer);

  /// Decides on what optimizer->measure_gradients() found, and prepares the optimizer's tables,
  /// which may be empty.
  void decide(const CudaStep& step, const CudaTables& tables, const CudaRanks& ranks,
              CudaOptimizer* optimizer);

  void update();

  /// Multiplies waiting gradients by `factor`, or by the scale if they are unscaled.
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
