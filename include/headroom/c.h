// Headroom for C and for every language that can call C. docs/c.md is the guide.
//
// - Every function that can fail returns hr_status. hr_last_error() returns the message: what is
//   wrong, where, and what to do. A call that fails changes nothing unless its comment says so.
// - hr_scaler* and hr_optimizer* are identifiers, not addresses. A destroyed or invalid handle
//   returns HR_ERROR_BAD_HANDLE; a handle value is never reused.
// - Any function may be called from any thread. Concurrent calls on the same handle are serialized.
// - A struct that begins with `size` may get new members at its end. Set `size` to sizeof, or let
//   its init function do so; an unknown size returns HR_ERROR_VERSION. All other structs never
//   change.
// - An int32_t that answers a question (enabled, applied, read_only) is 0 for no and nonzero for
//   yes.
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
  HR_ERROR_INVALID_ARGUMENT = 1,  // a value that is never valid
  HR_ERROR_MISMATCH = 2,          // two arguments that do not fit together
  HR_ERROR_WRONG_ORDER = 3,       // the call is not allowed at this point
  HR_ERROR_UNSUPPORTED = 4,       // not in this build, or not for this type
  HR_ERROR_BAD_STATE = 5,         // a saved state that is damaged or belongs to something else
  HR_ERROR_OVERFLOW = 6,          // inf or nan in the gradients, with on_overflow=throw
  HR_ERROR_OUT_OF_MEMORY = 7,     // on the host or on a CUDA device
  HR_ERROR_SCALE_COLLAPSED = 8,   // the scale is at its minimum, or too many steps were skipped
  HR_ERROR_FILE = 9,              // a file or folder cannot be created, read or written
  HR_ERROR_RANK_LOST = 10,        // another rank has exited or did not answer in time
  HR_ERROR_RANKS_DIFFER = 11,     // the ranks made different calls, or their states differ
  HR_ERROR_NULL = 100,            // a null pointer or handle where one is required
  HR_ERROR_BAD_HANDLE = 101,      // a handle that is destroyed, of the other kind, or invalid
  HR_ERROR_VERSION = 102,         // a struct or a program of a version that this library lacks
  HR_ERROR_BUFFER_TOO_SMALL = 103,
  HR_ERROR_CALLBACK = 104,  // a callback returned an error or threw
  HR_ERROR_INTERNAL = 105   // a bug in Headroom; please report it
};

/// The message of this thread's last failed call; "" if none has failed. Valid until the next
/// failure in this thread; at most 1023 bytes.
HR_API const char* hr_last_error(void);

/// Short name of a status, such as "wrong order".
HR_API const char* hr_status_name(hr_status status);

// ---- The library --------------------------------------------------------------------------------

/// For example "0.1.0".
HR_API const char* hr_version(void);

/// HR_ERROR_VERSION unless this library supports programs that were compiled against this version
/// of the header: hr_check_version(HEADROOM_VERSION_MAJOR, HEADROOM_VERSION_MINOR).
HR_API hr_status hr_check_version(int32_t major, int32_t minor);

/// Maximum number of threads of one call; 0 restores the default. Results do not depend on it.
HR_API hr_status hr_set_num_threads(int32_t threads);
HR_API hr_status hr_num_threads(int32_t* threads);

/// The SIMD instruction set in use; the environment variable HEADROOM_SIMD forces another. All
/// functions that return text do it like this one: the text is written to `buffer`, terminated by
/// 0, and `*needed` (if not null) is set to its size in bytes, including the 0. A null buffer with
/// a capacity of 0 only sets `*needed`. If the buffer is too small, `*needed` is set and
/// HR_ERROR_BUFFER_TOO_SMALL returned.
HR_API hr_status hr_simd_target(char* buffer, size_t capacity, size_t* needed);

HR_API hr_status hr_cuda_available(int32_t* available);

/// Sets the cudaStream_t on which this thread's later calls enqueue work on CUDA tensors; null (the
/// initial value) is the default stream. HR_ERROR_UNSUPPORTED for a stream without CUDA.
HR_API hr_status hr_set_stream(void* cuda_stream);

// ---- Tensors ------------------------------------------------------------------------------------

enum { HR_F16 = 0, HR_BF16 = 1, HR_F32 = 2, HR_F64 = 3 };
enum { HR_CPU = 0, HR_CUDA = 1 };

/// A view of `count` contiguous elements at `data`, with any alignment. The caller owns the memory.
/// All members 0: no tensor.
typedef struct hr_tensor {
  void* data;
  int64_t count;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t read_only;  // calls that write to it return HR_ERROR_INVALID_ARGUMENT
} hr_tensor;

static inline hr_tensor hr_cpu_tensor(void* data, int32_t dtype, int64_t count) {
  hr_tensor tensor = {data, count, dtype, HR_CPU, 0, 0};
  return tensor;
}

/// One trainable tensor. Without a gradient (all members 0) it is neither measured nor updated. The
/// name may be null; it is copied.
typedef struct hr_parameter {
  const char* name;
  hr_tensor weight;
  hr_tensor grad;
} hr_parameter;

/// Copies and converts between f16, bf16 and f32. Rounds to nearest even; keeps subnormals and NaN.
HR_API hr_status hr_convert(const hr_tensor* from, const hr_tensor* to);

/// hr_from_dlpack: a view of a contiguous tensor; `managed` keeps ownership and must outlive it.
/// hr_to_dlpack: a one-dimensional tensor over the caller's memory; its deleter frees the
/// descriptor and never the data.
struct DLManagedTensor;
HR_API hr_status hr_from_dlpack(const struct DLManagedTensor* managed, hr_tensor* tensor);
HR_API hr_status hr_to_dlpack(const hr_tensor* tensor, struct DLManagedTensor** managed);

// ---- Measuring ----------------------------------------------------------------------------------

/// Statistics of a list of tensors. Inf and nan elements count in inf_count and nan_count only.
typedef struct hr_stats {
  int64_t count;  // elements
  int64_t inf_count;
  int64_t nan_count;
  double amax;      // largest finite magnitude
  double norm;      // L2; nan if any element is nan, else inf if any is inf
  int64_t culprit;  // index of the first tensor with inf or nan; -1 if none
  int64_t culprit_inf;
  int64_t culprit_nan;
  int64_t new_inf;    // by unscaling: finite elements that became inf
  int64_t new_zeros;  // by unscaling: nonzero elements that became zero
} hr_stats;

enum { HR_HISTOGRAM_BINS = 277, HR_HISTOGRAM_MIN_EXPONENT = -149 };

/// Element counts by magnitude.
typedef struct hr_detail {
  size_t size;
  int64_t zeros;
  int64_t subnormals;                    // in the tensor's own type
  int64_t histogram[HR_HISTOGRAM_BINS];  // [e + 149]: 2^e <= |x| < 2^(e+1)
} hr_detail;

/// Reads every tensor once. `detail` may be null.
HR_API hr_status hr_measure(const hr_tensor* tensors, size_t count, hr_stats* stats,
                            hr_detail* detail);

/// Multiplies all tensors by `inverse_scale` in place. `stats` (may be null) describes them as they
/// were before, with new_inf and new_zeros. Tensors that share memory return
/// HR_ERROR_INVALID_ARGUMENT.
HR_API hr_status hr_unscale(const hr_tensor* tensors, size_t count, float inverse_scale,
                            hr_stats* stats);

// ---- Policies -----------------------------------------------------------------------------------

// A policy determines how the scale changes. It is passed as text, a preset optionally followed by
// settings: "megatron", "static:scale=512", "torch:growth_interval=500,max_skips_in_row=20".
// docs/policies.md lists all presets and settings.

/// The presets. The strings are valid forever; `summary` may be null.
HR_API hr_status hr_preset_count(size_t* count);
HR_API hr_status hr_preset_info(size_t index, const char** name, const char** summary);

// ---- Optimizers ---------------------------------------------------------------------------------

typedef struct hr_optimizer hr_optimizer;

enum { HR_SGD = 0, HR_ADAM = 1, HR_ADAMW = 2, HR_LION = 3 };

/// How masters and moments are stored: in FP32, or in 16 or 8 bits (docs/state.md).
enum { HR_STATE_FULL = 0, HR_STATE_HALF = 1, HR_STATE_BYTE = 2 };

/// Options of a parameter group. SGD ignores the betas and eps; Adam and AdamW ignore momentum,
/// dampening and nesterov; Lion ignores all of these but the betas.
typedef struct hr_fused_options {
  size_t size;
  double lr;
  double weight_decay;
  double momentum;  // whether it is 0 cannot change after the group is created
  double dampening;
  double beta1;
  double beta2;
  double eps;
  int32_t nesterov;
  int32_t reserved;
} hr_fused_options;

/// How 16-bit weights are stored.
typedef struct hr_precision {
  size_t size;
  uint64_t seed;                // of the stochastic rounding
  int32_t master_weights;       // keep FP32 copies and apply the updates to them
  int32_t stochastic_rounding;  // of bf16 weights
  int32_t state;                // HR_STATE_FULL, HR_STATE_HALF or HR_STATE_BYTE
  int32_t reserved;
} hr_precision;

/// Set all members to their defaults, which are those of torch.optim.
HR_API hr_status hr_fused_options_init(hr_fused_options* options, size_t size, int32_t kind);
HR_API hr_status hr_precision_init(hr_precision* precision, size_t size);

/// Creates SGD, Adam or AdamW, by torch.optim's formulas, or Lion. `kind` is HR_SGD, HR_ADAM,
/// HR_ADAMW or HR_LION. Null options or precision: the defaults. The parameters' memory must
/// outlive the optimizer.
HR_API hr_status hr_fused_create(int32_t kind, const hr_parameter* parameters, size_t count,
                                 const hr_fused_options* options, const hr_precision* precision,
                                 hr_optimizer** optimizer);

/// Parameter groups with their own options. hr_fused_create makes group 0; `*group` (may be null)
/// is the index of the new one. HR_ERROR_UNSUPPORTED if the optimizer was not made by
/// hr_fused_create.
HR_API hr_status hr_fused_add_group(hr_optimizer* optimizer, const hr_parameter* parameters,
                                    size_t count, const hr_fused_options* options, size_t* group);
HR_API hr_status hr_fused_set_options(hr_optimizer* optimizer, size_t group,
                                      const hr_fused_options* options);
HR_API hr_status hr_fused_get_options(hr_optimizer* optimizer, size_t group,
                                      hr_fused_options* options);

/// Sets the learning rate of all groups.
HR_API hr_status hr_optimizer_set_lr(hr_optimizer* optimizer, double lr);

/// Copies the values of 16-bit weights to their masters, after the caller has changed some weights.
/// A step notices larger changes by itself, see docs/numbers.md.
HR_API hr_status hr_optimizer_refresh_masters(hr_optimizer* optimizer);

/// The caller's own optimizer. `apply` updates the weights with gradient x multiplier, and zeroes
/// the gradients if `clear_grads` is not 0. It returns 0, or an error: hr_scaler_step then returns
/// HR_ERROR_CALLBACK and does not count the step. `skipped` (may be null) is called instead when a
/// step is skipped. Neither may use the calling scaler or its optimizers (HR_ERROR_WRONG_ORDER).
///
/// A callback, including on_alarm, may end like this:
/// - It returns. A C++ exception that leaves it becomes HR_ERROR_CALLBACK.
/// - pthread_exit or thread cancellation, with glibc only: the thread ends, the handles of the call
///   are released, and the outcome is as after HR_ERROR_CALLBACK.
/// - longjmp out of a callback is undefined behaviour: the locks of the call stay held. Return an
///   error, and longjmp after the hr_ function has returned.
typedef struct hr_optimizer_callbacks {
  size_t size;
  int32_t (*apply)(float multiplier, int32_t clear_grads, void* user);
  void (*skipped)(const char* culprit, void* user);
  void* user;
} hr_optimizer_callbacks;

HR_API hr_status hr_optimizer_create(const hr_parameter* parameters, size_t count,
                                     const hr_optimizer_callbacks* callbacks,
                                     hr_optimizer** optimizer);

/// FP32 sums of unscaled gradients. Scalers step an accumulator like an optimizer;
/// hr_accumulator_step then steps the real optimizer. Create that one on the parameters that
/// hr_accumulator_summed returns, and destroy it before the accumulator.
HR_API hr_status hr_accumulator_create(const hr_parameter* parameters, size_t count,
                                       hr_optimizer** accumulator);
HR_API hr_status hr_accumulator_summed(hr_optimizer* accumulator, size_t index,
                                       hr_parameter* parameter);

/// Waits for calls in other threads. No callback is called after it returns.
HR_API hr_status hr_optimizer_destroy(hr_optimizer* optimizer);

/// Writes zeros to all gradients.
HR_API hr_status hr_optimizer_zero_grad(hr_optimizer* optimizer);

/// Replaces the gradient of a parameter; null: none.
HR_API hr_status hr_optimizer_set_grad(hr_optimizer* optimizer, size_t index,
                                       const hr_tensor* grad);

/// Replaces the memory of all weights and gradients. Number, sizes and types stay.
HR_API hr_status hr_optimizer_rebind(hr_optimizer* optimizer, const hr_parameter* parameters,
                                     size_t count);

/// A tensor of an optimizer's state: "embed.weight/master", "embed.weight/exp_avg".
typedef struct hr_state_tensor {
  const char* name;
  hr_tensor tensor;
  int64_t parameter;  // the index of "embed.weight"
} hr_state_tensor;

/// The complete state of SGD, Adam, AdamW or Lion, in FP32 whatever hr_precision::state is.
typedef struct hr_optimizer_state {
  size_t size;
  size_t step_count;
  const int64_t* steps;  // applied steps of each parameter
  size_t tensor_count;
  const hr_state_tensor* tensors;
} hr_optimizer_state;

/// get_state: the pointers in `state` belong to the optimizer and are valid until the next
/// get_state or destroy of it. load_state copies; HR_ERROR_BAD_STATE, changing nothing, unless the
/// state fits the optimizer.
HR_API hr_status hr_optimizer_get_state(hr_optimizer* optimizer, hr_optimizer_state* state);
HR_API hr_status hr_optimizer_load_state(hr_optimizer* optimizer, const hr_optimizer_state* state);

// ---- The scaler ---------------------------------------------------------------------------------

typedef struct hr_scaler hr_scaler;

enum { HR_ALARM_NONE = 0, HR_ALARM_AT_FLOOR = 1, HR_ALARM_SKIPS_IN_ROW = 2 };

/// Argument of on_alarm. The strings are valid until the callback returns.
typedef struct hr_alarm {
  size_t size;
  int32_t alarm;
  float scale;
  int64_t skips_in_row;
  const char* culprit;
  const char* sentence;  // what is wrong and what to do
} hr_alarm;

/// Options of hr_scaler_create(). `size` is sizeof(hr_scaler_options).
typedef struct hr_scaler_options {
  size_t size;
  int32_t enabled;
  int32_t device_type;  // where the scale is stored; with HR_CUDA steps are asynchronous
  int32_t device_index;
  int32_t reserved;
  /// Called at the end of hr_scaler_update, under the rules of hr_optimizer_callbacks. If null, the
  /// update is completed and returns HR_ERROR_SCALE_COLLAPSED.
  void (*on_alarm)(const hr_alarm* alarm, void* user);
  void* user;
} hr_scaler_options;

enum { HR_CLEAR_ON_SKIP = 0, HR_CLEAR_ALWAYS = 1, HR_CLEAR_NEVER = 2 };

/// Options of hr_scaler_step(). `size` is sizeof(hr_step_options).
typedef struct hr_step_options {
  size_t size;
  float max_norm;  // clip the L2 norm of the unscaled gradients to this; 0: no clipping
  int32_t clear_grads;
  float skip_above_norm;  // skip the step if the norm exceeds this; 0: never
  int32_t reserved;
  void* stream;  // cudaStream_t; null: the stream of hr_set_stream
} hr_step_options;

enum {
  HR_SKIP_NO = 0,
  HR_SKIP_NOT_FINITE = 1,
  HR_SKIP_UNSCALE_OVERFLOW = 2,
  HR_SKIP_NORM_TOO_LARGE = 3
};

/// The outcome of one step.
typedef struct hr_report {
  size_t size;
  int32_t pending;  // not finished on the CUDA device; the other members have no meaning
  int32_t applied;
  int32_t skip;      // the reason if not applied
  float scale;       // by which the loss of these gradients was multiplied
  double grad_norm;  // of the unscaled gradients before clipping
  double clip_factor;
  int64_t steps;           // of this optimizer under this scaler so far,
  int64_t skipped;         // of which skipped
  hr_stats stats;          // of the gradients in memory, still scaled
  char culprit_text[256];  // "embed.weight: 3 inf, 0 nan", truncated if the name is too long
} hr_report;

/// The scale and its counters. hr_scaler_save returns the complete state.
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

/// Null policy: "dynamic". Null options: the defaults.
HR_API hr_status hr_scaler_create(const char* policy, const hr_scaler_options* options,
                                  hr_scaler** scaler);
HR_API hr_status hr_scaler_destroy(hr_scaler* scaler);

/// loss x scale; run backward from the result. For tensors `scaled` is f32 and may be the memory of
/// the loss. A scaler on a CUDA device accepts tensors only.
HR_API hr_status hr_scaler_scale(hr_scaler* scaler, float loss, float* scaled);
HR_API hr_status hr_scaler_scale_tensor(hr_scaler* scaler, const hr_tensor* loss,
                                        const hr_tensor* scaled);

/// The device address of the scale, for trainers that compute loss and backward in one kernel;
/// valid until the scaler is destroyed. After this call the scaler assumes a scaled loss before
/// each step.
HR_API hr_status hr_scaler_device_scale(hr_scaler* scaler, const float** scale);

/// Divides the gradients by the scale in place, so that the caller can clip or inspect them before
/// the step. If no step follows, the update multiplies them by the scale again. `stats` may be
/// null; with a scaler on a CUDA device it is empty.
HR_API hr_status hr_scaler_unscale(hr_scaler* scaler, hr_optimizer* optimizer, hr_stats* stats);

/// Measures the gradients, decides, and applies or skips the step. Null options: the defaults;
/// `report` may be null. With on_overflow=throw a step with inf or nan is skipped, `report` is
/// filled and HR_ERROR_OVERFLOW returned.
HR_API hr_status hr_scaler_step(hr_scaler* scaler, hr_optimizer* optimizer,
                                const hr_step_options* options, hr_report* report);
HR_API hr_status hr_accumulator_step(hr_optimizer* accumulator, hr_optimizer* optimizer,
                                     const hr_step_options* options, hr_report* report);

/// update: adapts the scale, once after all optimizers have stepped. set_scale: sets it.
HR_API hr_status hr_scaler_update(hr_scaler* scaler);
HR_API hr_status hr_scaler_set_scale(hr_scaler* scaler, float scale);

/// After an update with a policy that retries ("headroom-retry"): 1 if the last batch should be run
/// again because it was skipped and the scale has been lowered, else 0. With such a policy,
/// hr_scaler_step returns HR_ERROR_UNSUPPORTED for a second optimizer in a round and for
/// accumulators.
HR_API hr_status hr_scaler_retry(hr_scaler* scaler, int32_t* retry);

/// Call this after dropping the gradients of a scaled loss without a step.
HR_API hr_status hr_scaler_discard(hr_scaler* scaler);

/// The outcome of the last step of one optimizer or, with null, of any. hr_scaler_report waits for
/// a CUDA device. hr_scaler_try_report never waits; it sets `pending` if no outcome is available.
HR_API hr_status hr_scaler_report(hr_scaler* scaler, hr_optimizer* optimizer, hr_report* report);
HR_API hr_status hr_scaler_try_report(hr_scaler* scaler, hr_optimizer* optimizer,
                                      hr_report* report);

/// One line for a log: "skipped at scale 65536: embed.weight: 3 inf, 0 nan".
HR_API hr_status hr_report_text(const hr_report* report, char* buffer, size_t capacity,
                                size_t* needed);

/// The scale and the state; both wait for a CUDA device.
HR_API hr_status hr_scaler_get_scale(hr_scaler* scaler, float* scale);
HR_API hr_status hr_scaler_get_state(hr_scaler* scaler, hr_scale_state* state);

/// The policy as text with all its settings, every number exact.
HR_API hr_status hr_scaler_get_policy(hr_scaler* scaler, char* buffer, size_t capacity,
                                      size_t* needed);
HR_API hr_status hr_scaler_set_policy(hr_scaler* scaler, const char* policy);

/// Policy and state as JSON, every number exact. Not allowed between a step and its update.
HR_API hr_status hr_scaler_save(hr_scaler* scaler, char* buffer, size_t capacity, size_t* needed);
HR_API hr_status hr_scaler_load(hr_scaler* scaler, const char* json);

#ifdef __cplusplus
}
#endif

#endif  // HEADROOM_C_H_
