// A GradScaler whose scale, counters and verdicts live on a CUDA device. Everything here only
// enqueues, unless its name says that it waits.
#ifndef HEADROOM_SRC_SCALER_CUDA_H_
#define HEADROOM_SRC_SCALER_CUDA_H_

#include <headroom/policy.h>

#include <optional>
#include <vector>

#include "agree/agree.h"
#include "apply/cuda.h"
#include "core/cuda.h"
#include "measure/cuda.h"

namespace headroom::internal {

/// Where the numbers of a report come from, if several ranks train together.
struct CudaOrigin {
  int64_t count = -1;  // elements on all ranks; -1: there is one rank
  int culprit_rank = -1;
  bool same_list = false;  // the ranks' tensors have the same names
};

/// What ranks tell each other about an optimizer's gradients, and what came of it.
struct CudaAgreement {
  Message message;
  CudaStats all;
  CudaOrigin origin;
  bool differ;  // they are out of step, or have drifted apart
};

/// In what ranks differ, as in differ_sentence().
struct CudaDifference {
  int which;
  double low, high;
};

/// The ranks to ask, and where this one stands as far as the host knows; alone: null.
struct CudaRanks {
  Ranks* ranks = nullptr;
  Stand stand;
};

/// What a step did.
struct CudaReport {
  int64_t steps;    // of this optimizer so far,
  int64_t skipped;  // of which skipped
  float scale;
  Verdict verdict;
  CudaStats stats;
  CudaOrigin origin;
};

/// An update has raised an alarm.
struct CudaAlarm {
  Alarm alarm;
  float scale;
  int64_t skips_in_row;
};

/// The last few values that a kernel told the host, which looks without waiting.
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
  ScalePolicy policy;
  ScaleState state;
  float used;      // of the last scale()
  float factor;    // the scale of the last update over the one before
  StepSeen seen;   // in this round
  int64_t alarms;  // these so far
  int64_t messages;
  int64_t differences;
};

/// What the device knows of an optimizer under the scaler.
struct CudaKnown {
  float scale;      // of its gradients in memory
  float inverse;    // 1 / scale
  double amax;      // of its gradients as they came, in this round
  bool overflow;    // found by unscale_,
  CudaStats found;  // namely this,
  CudaOrigin origin;
  int64_t steps;
  int64_t skipped;
};

/// What the host knows of a step when it enqueues it.
struct CudaOrder {
  float max_norm = 0.0f;
  const float* outside_scale = nullptr;
  const float* outside_found = nullptr;
  float* tell_skipped = nullptr;
  bool enabled = true;
  bool first = false;     // the optimizer's first
  bool fresh = false;     // the optimizer's first of this round
  bool current = false;   // its gradients have the present scale
  bool unscaled = false;  // they were unscaled already
};

/// An optimizer under a scaler on a device.
class CudaOptimizer {
 public:
  explicit CudaOptimizer(int device);
  void set_scale(float scale);
  CudaKnown* known() const { return known_.data(); }

  /// What was found in its gradients, by all ranks if there are several.
  const CudaStats* found() const {
    return agreement.data() != nullptr ? &agreement.data()->all : measure.stats();
  }

  CudaMeasure measure;
  CudaArray<CudaAgreement> agreement;  // null if there is one rank
  CudaMailbox<CudaReport> reports;

 private:
  CudaArray<CudaKnown> known_;
};

class CudaScaler {
 public:
  explicit CudaScaler(int device);
  int device() const { return device_; }

  void set_state(const ScalePolicy& policy, const ScaleState& state);
  ScaleState wait_state() const;

  /// out = loss x scale.
  void scale(const TensorView& loss, const TensorView& out);

  /// Unscales the gradients that optimizer->measure lists.
  void unscale(const CudaOrder& order, const CudaRanks& ranks, CudaOptimizer* optimizer);

  /// Decides on what optimizer->measure found, and prepares the optimizer's tables, which may be
  /// empty.
  void decide(const CudaOrder& order, const CudaTables& tables, const CudaRanks& ranks,
              CudaOptimizer* optimizer);

  void update();

  /// Brings gradients that wait, unscaled or with the scale before the last update(), to the one
  /// after it.
  void rescale(bool unscaled, CudaOptimizer* optimizer);

  CudaMailbox<CudaAlarm> alarms;
  CudaMailbox<CudaDifference> differences;

 private:
  void agree(const CudaOrder& order, const CudaRanks& ranks, CudaOptimizer* optimizer);

  int device_;
  CudaArray<CudaScale> scale_;
};

/// Why gradients up to `amax` could not be divided by `scale`.
std::string describe_unscaling(double amax, float scale);
std::string describe_unscaling_in_place(double amax, float scale);

/// out = loss x scale, for tensors on a CUDA device and a scale on the host.
void cuda_scale(const TensorView& loss, float scale, const TensorView& out);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_SCALER_CUDA_H_
