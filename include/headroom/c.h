// Headroom for C and for every language that can call C. docs/c.md is the guide.
//
// - Every function that can fail returns hr_status. hr_last_error() has the sentence: what is
//   wrong, where, and what to do. A call that fails has changed nothing, unless it says otherwise.
// - hr_scaler* and hr_optimizer* are numbers in the shape of pointers. One that was destroyed, or
//   that never was, gives HR_ERROR_BAD_HANDLE; no number is given out twice.
// - Any function may be called from any thread. Calls on the same handle wait for one another.
// - A struct that begins with `size` grows at its end only: set `size` to sizeof, or let its init
//   function do so. A size that the library does not know gives HR_ERROR_VERSION.
//   hr_tensor, hr_parameter and hr_state_tensor stand in arrays and never change.
// - An int32_t named like a question (dynamic, enabled, applied) is 0 for no, all else is yes.
#ifndef HEADROOM_C_H_
#define HEADROOM_C_H_

#include <headroom/version.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HR_API __attribute__((visibility("default")))
#else
#define HR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- Errors -------------------------------------------------------------------------------------

typedef int32_t hr_status;
enum {
  HR_OK = 0,
  HR_ERROR_INVALID_ARGUMENT = 1,  // a value that can never work
  HR_ERROR_MISMATCH = 2,          // two things that do not fit
  HR_ERROR_WRONG_ORDER = 3,       // a call at the wrong moment
  HR_ERROR_UNSUPPORTED = 4,       // understood, but not in this build or not for this type
  HR_ERROR_BAD_STATE = 5,         // a saved state that is damaged or from something else
  HR_ERROR_OVERFLOW = 6,          // inf or nan in the gradients, and the policy asks for an error
  HR_ERROR_OUT_OF_MEMORY = 7,     // of the host or a CUDA device
  HR_ERROR_SCALE_COLLAPSED = 8,   // the scale is at its floor, or too many steps were skipped
  HR_ERROR_FILE = 9,              // a file or folder that cannot be made, read or written
  HR_ERROR_RANK_LOST = 10,        // another rank is gone, or did not come within the time limit
  HR_ERROR_RANKS_DIFFER = 11,     // the ranks are out of step, or have drifted apart
  HR_ERROR_NULL = 100,            // a null pointer or handle where there has to be one
  HR_ERROR_BAD_HANDLE = 101,      // destroyed, of another kind, or never made
  HR_ERROR_VERSION = 102,         // a struct or a program of a version this library does not know
  HR_ERROR_BUFFER_TOO_SMALL = 103,
  HR_ERROR_CALLBACK = 104,  // a callback said that it failed
  HR_ERROR_INTERNAL = 105   // a defect of Headroom; please report it
};

/// The sentence of this thread's last call that failed, "" before the first. It stands until the
/// next call of this thread that fails; at most 1023 bytes.
HR_API const char* hr_last_error(void);

/// Short name of a status, such as "wrong order".
HR_API const char* hr_status_name(hr_status status);

// ---- The library --------------------------------------------------------------------------------

/// Such as "0.1.0".
HR_API const char* hr_version(void);

/// HR_ERROR_VERSION unless this library serves programs that were compiled against the header of
/// this version: hr_check_version(HEADROOM_VERSION_MAJOR, HEADROOM_VERSION_MINOR).
HR_API hr_status hr_check_version(int32_t major, int32_t minor);

/// Threads a call may use; 0 restores the default. Results do not depend on it.
HR_API hr_status hr_set_num_threads(int32_t threads);
HR_API hr_status hr_num_threads(int32_t* threads);

/// Texts come out like this everywhere: they go to `buffer`, ending with 0, and `*needed` (may be
/// null) says how many bytes that takes, the 0 included. With a null buffer and a capacity of 0
/// only `*needed` is told, and so it is with HR_ERROR_BUFFER_TOO_SMALL.
HR_API hr_status hr_simd_target(char* buffer, size_t capacity, size_t* needed);

/// Not to be called while another thread is inside the library.
HR_API hr_status hr_set_simd_target(const char* name);

HR_API hr_status hr_cuda_available(int32_t* available);

/// From now on everything that this thread asks of CUDA tensors is enqueued on this cudaStream_t;
/// null: on the default stream, as at first. HR_ERROR_UNSUPPORTED for a stream without CUDA.
HR_API hr_status hr_set_stream(void* cuda_stream);

// ---- Tensors ------------------------------------------------------------------------------------

enum { HR_F16 = 0, HR_BF16 = 1, HR_F32 = 2, HR_F64 = 3 };
enum { HR_CPU = 0, HR_CUDA = 1 };

/// `count` contiguous elements at `data`, of any alignment. The memory stays the caller's. All
/// zeros: no tensor.
typedef struct hr_tensor {
  void* data;
  int64_t count;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t read_only;  // calls that would write refuse it
} hr_tensor;

static inline hr_tensor hr_cpu_tensor(void* data, int32_t dtype, int64_t count) {
  hr_tensor tensor = {data, count, dtype, HR_CPU, 0, 0};
  return tensor;
}

/// One trainable tensor. Without a gradient (all zeros) it is neither measured nor updated. The
/// name may be null, and is copied.
typedef struct hr_parameter {
  const char* name;
  hr_tensor weight;
  hr_tensor grad;
} hr_parameter;

/// Copies with conversion between f16, bf16 and f32: to nearest even, subnormals and NaN kept.
HR_API hr_status hr_convert(const hr_tensor* from, const hr_tensor* to);

/// DLPack: a view of a contiguous tensor, which keeps its owner and must outlive the view; and a
/// one-dimensional tensor over memory, whose deleter frees the descriptor and never the data.
struct DLManagedTensor;
HR_API hr_status hr_from_dlpack(const struct DLManagedTensor* managed, hr_tensor* tensor);
HR_API hr_status hr_to_dlpack(const hr_tensor* tensor, struct DLManagedTensor** managed);

// ---- Measuring ----------------------------------------------------------------------------------

enum { HR_HISTOGRAM_BINS = 277, HR_HISTOGRAM_MIN_EXPONENT = -149 };

/// What one read of a list of tensors found, as they are in memory.
typedef struct hr_stats {
  size_t size;
  int64_t count;
  int64_t inf_count;
  int64_t nan_count;
  double amax;      // largest finite magnitude
  double norm;      // L2; nan if any element is, else inf if any is
  int64_t culprit;  // index of the first tensor with inf or nan; -1 if none
  int64_t culprit_inf;
  int64_t culprit_nan;
  int64_t zeros;  // these three only if `detail` is asked for
  int64_t subnormals;
  int64_t histogram[HR_HISTOGRAM_BINS];  // [e + 149]: 2^e <= |x| < 2^(e+1)
} hr_stats;

HR_API hr_status hr_measure(const hr_tensor* tensors, size_t count, int32_t detail,
                            hr_stats* stats);

typedef struct hr_unscale_result {
  size_t size;
  int64_t inf_count;  // as they arrived
  int64_t nan_count;
  int64_t new_inf;    // finite elements that became inf
  int64_t new_zeros;  // nonzero elements that became zero
  int64_t culprit;    // index of the first tensor with inf or nan; -1 if none
  double norm;        // before
} hr_unscale_result;

/// Multiplies all tensors by `inverse_scale` in place. `result` may be null. Tensors that share
/// memory are refused (HR_ERROR_INVALID_ARGUMENT).
HR_API hr_status hr_unscale(const hr_tensor* tensors, size_t count, float inverse_scale,
                            hr_unscale_result* result);

// ---- Policies -----------------------------------------------------------------------------------

// A policy says how the scale moves. It is passed as text: a preset, and settings that differ from
// it: "megatron", "static:scale=512", "torch:growth_interval=500,max_skips_in_row=20".
// docs/policies.md has the rules and all settings.

/// The presets' names and summaries, which stand forever; `summary` may be null.
HR_API hr_status hr_preset_count(size_t* count);
HR_API hr_status hr_preset_info(size_t index, const char** name, const char** summary);

/// The rule and all settings of a policy, every number exact; HR_ERROR_INVALID_ARGUMENT if the text
/// is none, or impossible.
HR_API hr_status hr_policy_settings(const char* policy, char* buffer, size_t capacity,
                                    size_t* needed);

// ---- Optimizers ---------------------------------------------------------------------------------

typedef struct hr_optimizer hr_optimizer;

typedef struct hr_sgd_options {
  size_t size;
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  int32_t nesterov;
  int32_t reserved;
} hr_sgd_options;

/// Of Adam and of AdamW.
typedef struct hr_adam_options {
  size_t size;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
} hr_adam_options;

/// How 16-bit weights are kept: with FP32 masters, bf16 rounded at random or not.
typedef struct hr_precision {
  size_t size;
  uint64_t seed;
  int32_t master_weights;
  int32_t stochastic_rounding;
} hr_precision;

HR_API hr_status hr_sgd_options_init(hr_sgd_options* options, size_t size);
HR_API hr_status hr_adam_options_init(hr_adam_options* options, size_t size);
HR_API hr_status hr_adamw_options_init(hr_adam_options* options, size_t size);
HR_API hr_status hr_precision_init(hr_precision* precision, size_t size);

/// The fused optimizers. Null options or precision: the defaults. The parameters' memory must
/// outlive the optimizer.
HR_API hr_status hr_sgd_create(const hr_parameter* parameters, size_t count,
                               const hr_sgd_options* options, const hr_precision* precision,
                               hr_optimizer** optimizer);
HR_API hr_status hr_adam_create(const hr_parameter* parameters, size_t count,
                                const hr_adam_options* options, const hr_precision* precision,
                                hr_optimizer** optimizer);
HR_API hr_status hr_adamw_create(const hr_parameter* parameters, size_t count,
                                 const hr_adam_options* options, const hr_precision* precision,
                                 hr_optimizer** optimizer);

/// An optimizer of your own under a scaler. `apply` updates the weights with gradient x multiplier,
/// and zeroes the gradients if asked to; it returns 0, or anything else to make hr_scaler_step
/// return HR_ERROR_CALLBACK, which then has not counted the step. `skipped` (may be null) comes in
/// its place when a step is skipped. Neither may use the scaler that calls it or that scaler's
/// optimizers (HR_ERROR_WRONG_ORDER).
///
/// How a callback may end, these and on_alarm:
/// - It returns. An exception that leaves one in C++ becomes HR_ERROR_CALLBACK.
/// - pthread_exit, and cancellation of the thread, with glibc: the thread ends, the handles of the
///   call are free again, and the call is as after HR_ERROR_CALLBACK. With other C libraries it is
///   forbidden.
/// - longjmp out of it is forbidden; the behaviour is undefined. The locks of the call stay held:
///   later calls on its handles, destroy included, return HR_ERROR_WRONG_ORDER in the same thread
///   and hang in others. Return an error instead, and longjmp once the hr_ call has returned.
typedef struct hr_optimizer_callbacks {
  size_t size;
  int32_t (*apply)(float multiplier, int32_t clear_grads, void* user);
  void (*skipped)(const char* culprit, void* user);
  void* user;
} hr_optimizer_callbacks;

HR_API hr_status hr_optimizer_create(const hr_parameter* parameters, size_t count,
                                     const hr_optimizer_callbacks* callbacks,
                                     hr_optimizer** optimizer);

/// FP32 sums of unscaled gradients, stepped by scalers like an optimizer; hr_accumulator_step then
/// steps the real optimizer, which was made on what hr_accumulator_summed gives and is destroyed
/// before the accumulator.
HR_API hr_status hr_accumulator_create(const hr_parameter* parameters, size_t count,
                                       hr_optimizer** accumulator);
HR_API hr_status hr_accumulator_summed(hr_optimizer* accumulator, size_t index,
                                       hr_parameter* parameter);

/// Waits for calls in progress in other threads; afterwards no callback is called any more.
HR_API hr_status hr_optimizer_destroy(hr_optimizer* optimizer);

/// Groups of parameters with options of their own; the first is 0. `group` may be null.
HR_API hr_status hr_sgd_add_group(hr_optimizer* optimizer, const hr_parameter* parameters,
                                  size_t count, const hr_sgd_options* options, size_t* group);
HR_API hr_status hr_sgd_set_options(hr_optimizer* optimizer, size_t group,
                                    const hr_sgd_options* options);
HR_API hr_status hr_sgd_get_options(hr_optimizer* optimizer, size_t group, hr_sgd_options* options);
HR_API hr_status hr_adam_add_group(hr_optimizer* optimizer, const hr_parameter* parameters,
                                   size_t count, const hr_adam_options* options, size_t* group);
HR_API hr_status hr_adam_set_options(hr_optimizer* optimizer, size_t group,
                                     const hr_adam_options* options);
HR_API hr_status hr_adam_get_options(hr_optimizer* optimizer, size_t group,
                                     hr_adam_options* options);

/// Sets the learning rate of every group.
HR_API hr_status hr_optimizer_set_lr(hr_optimizer* optimizer, double lr);

HR_API hr_status hr_optimizer_zero_grad(hr_optimizer* optimizer);

/// Another gradient for a parameter; null: none.
HR_API hr_status hr_optimizer_set_grad(hr_optimizer* optimizer, size_t index,
                                       const hr_tensor* grad);

/// The same parameters at other places.
HR_API hr_status hr_optimizer_rebind(hr_optimizer* optimizer, const hr_parameter* parameters,
                                     size_t count);

/// The name in `parameter` stands until the optimizer's parameters change.
HR_API hr_status hr_optimizer_parameter_count(hr_optimizer* optimizer, size_t* count);
HR_API hr_status hr_optimizer_parameter(hr_optimizer* optimizer, size_t index,
                                        hr_parameter* parameter);

/// Copies the weights' values to the masters, after weights were changed by hand.
HR_API hr_status hr_optimizer_refresh_masters(hr_optimizer* optimizer);

/// A tensor of an optimizer's state: "embed.weight/master", "embed.weight/exp_avg".
typedef struct hr_state_tensor {
  const char* name;
  hr_tensor tensor;
  int64_t parameter;  // the index of "embed.weight"
} hr_state_tensor;

/// All that a fused optimizer remembers: the applied steps of each parameter, and tensors.
typedef struct hr_optimizer_state {
  size_t size;
  size_t step_count;
  const int64_t* steps;
  size_t tensor_count;
  const hr_state_tensor* tensors;
} hr_optimizer_state;

/// What `state` points to is the optimizer's own and stands until the next call of this function
/// for it, or its end; copy it to keep it.
HR_API hr_status hr_optimizer_get_state(hr_optimizer* optimizer, hr_optimizer_state* state);
HR_API hr_status hr_optimizer_load_state(hr_optimizer* optimizer, const hr_optimizer_state* state);

// ---- The scaler ---------------------------------------------------------------------------------

typedef struct hr_scaler hr_scaler;

enum { HR_ALARM_NONE = 0, HR_ALARM_AT_FLOOR = 1, HR_ALARM_SKIPS_IN_ROW = 2 };

/// Training is in trouble. Everything in it stands until the callback returns.
typedef struct hr_alarm {
  size_t size;
  int32_t alarm;
  float scale;
  int64_t skips_in_row;
  const char* culprit;
  const char* sentence;  // what is wrong and what to do
} hr_alarm;

typedef struct hr_scaler_options {
  size_t size;
  int32_t enabled;
  int32_t device_type;  // where the scale lives; on HR_CUDA no call waits and reports are pending
  int32_t device_index;
  int32_t reserved;
  /// Called at the end of hr_scaler_update; under the rules of hr_optimizer_callbacks. Without it
  /// update, having done its work, returns HR_ERROR_SCALE_COLLAPSED.
  void (*on_alarm)(const hr_alarm* alarm, void* user);
  void* user;
} hr_scaler_options;

enum { HR_CLEAR_ON_SKIP = 0, HR_CLEAR_ALWAYS = 1, HR_CLEAR_NEVER = 2 };

typedef struct hr_step_options {
  size_t size;
  float max_norm;  // clip the unscaled gradients' L2 norm to this; 0: no clipping
  int32_t clear_grads;
  float skip_above_norm;  // skip the step if that norm is above this; 0: never
  int32_t reserved;
  void* stream;  // a cudaStream_t; null: the one of hr_set_stream
} hr_step_options;

enum {
  HR_SKIP_NO = 0,
  HR_SKIP_NOT_FINITE = 1,
  HR_SKIP_UNSCALE_OVERFLOW = 2,
  HR_SKIP_NORM_TOO_LARGE = 3
};

/// What one step did.
typedef struct hr_report {
  size_t size;
  int32_t pending;  // the step is on its way on a CUDA device and the rest is empty
  int32_t applied;
  int32_t skip;      // why not
  float scale;       // that these gradients were made with
  double grad_norm;  // of the unscaled gradients before clipping
  double clip_factor;
  int64_t steps;    // of this optimizer under this scaler so far,
  int64_t skipped;  // of which skipped
  int64_t count;    // of the gradients in memory: as in hr_stats
  int64_t inf_count;
  int64_t nan_count;
  double amax;
  double norm;
  int64_t culprit;
  int64_t culprit_inf;
  int64_t culprit_nan;
  char culprit_text[256];  // "embed.weight: 3 inf, 0 nan", cut off where a name is too long
} hr_report;

/// The scale and its counters; hr_scaler_save has everything that changes while training.
typedef struct hr_scale_state {
  size_t size;
  float scale;
  int32_t reserved;
  int64_t steps;    // updates so far,
  int64_t skipped;  // of which overflows
  int64_t skips_in_row;
} hr_scale_state;

HR_API hr_status hr_scaler_options_init(hr_scaler_options* options, size_t size);
HR_API hr_status hr_step_options_init(hr_step_options* options, size_t size);

/// Null policy or options: the defaults ("dynamic").
HR_API hr_status hr_scaler_create(const char* policy, const hr_scaler_options* options,
                                  hr_scaler** scaler);
HR_API hr_status hr_scaler_destroy(hr_scaler* scaler);

/// loss x scale, then run backward from it. For tensors `scaled` is f32, and may be the loss's own
/// memory; a scaler on a CUDA device takes tensors only.
HR_API hr_status hr_scaler_scale(hr_scaler* scaler, float loss, float* scaled);
HR_API hr_status hr_scaler_scale_tensor(hr_scaler* scaler, const hr_tensor* loss,
                                        const hr_tensor* scaled);

/// The address on the CUDA device of the scale to multiply by, for trainers whose loss and backward
/// are one fused kernel; valid as long as the scaler. From then on a loss is assumed to have been
/// scaled before every step.
HR_API hr_status hr_scaler_device_scale(hr_scaler* scaler, const float** scale);

/// Divides the gradients by the scale in place, to clip or look at them by hand before the step;
/// without a step, the update multiplies them by the scale again. `result` may be null.
HR_API hr_status hr_scaler_unscale(hr_scaler* scaler, hr_optimizer* optimizer,
                                   hr_unscale_result* result);

/// Measures, decides, and applies or skips. Null options: the defaults; `report` may be null. With
/// on_overflow=throw a bad step is skipped, reported, and returns HR_ERROR_OVERFLOW.
HR_API hr_status hr_scaler_step(hr_scaler* scaler, hr_optimizer* optimizer,
                                const hr_step_options* options, hr_report* report);
HR_API hr_status hr_accumulator_step(hr_optimizer* accumulator, hr_optimizer* optimizer,
                                     const hr_step_options* options, hr_report* report);

/// Moves the scale, once, after every optimizer has stepped; or sets it by hand.
HR_API hr_status hr_scaler_update(hr_scaler* scaler);
HR_API hr_status hr_scaler_set_scale(hr_scaler* scaler, float scale);

/// After an update, with a policy that retries ("headroom-retry"): 1 if the last batch is to be run
/// again, because it was skipped and the scale is lower now; else 0. With such a policy a second
/// optimizer in one round, and an accumulator, get HR_ERROR_UNSUPPORTED from the step.
HR_API hr_status hr_scaler_retry(hr_scaler* scaler, int32_t* retry);

/// Forgets losses that were scaled but not stepped, because their gradients are dropped.
HR_API hr_status hr_scaler_discard(hr_scaler* scaler);

/// What the last step did, of one optimizer or, with null, of all. The first waits for a CUDA
/// device; the second never does, and says `pending` if there is nothing to report yet.
HR_API hr_status hr_scaler_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report);
HR_API hr_status hr_scaler_try_report(hr_scaler* scaler, hr_optimizer* optimizer,
                                      hr_report* report);

/// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan". A pending report says
/// that its result is not known yet.
HR_API hr_status hr_report_text(const hr_report* report, char* buffer, size_t capacity,
                                size_t* needed);

HR_API hr_status hr_scaler_get_scale(hr_scaler* scaler, float* scale);
HR_API hr_status hr_scaler_get_state(hr_scaler* scaler, hr_scale_state* state);
HR_API hr_status hr_scaler_get_policy(hr_scaler* scaler, char* buffer, size_t capacity,
                                      size_t* needed);
HR_API hr_status hr_scaler_set_policy(hr_scaler* scaler, const char* policy);
HR_API hr_status hr_scaler_enabled(hr_scaler* scaler, int32_t* enabled);
HR_API hr_status hr_scaler_device(hr_scaler* scaler, int32_t* device_type, int32_t* device_index);

/// Policy and state as JSON, every number exact, after an update; and back.
HR_API hr_status hr_scaler_save(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed);
HR_API hr_status hr_scaler_load(hr_scaler* scaler, const char* json);

#ifdef __cplusplus
}
#endif

#endif  // HEADROOM_C_H_
