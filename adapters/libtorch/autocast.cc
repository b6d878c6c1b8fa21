// Autocast: sets LibTorch's thread-local autocast flags and restores them.
#include <ATen/autocast_mode.h>
#include <headroom/error.h>
#include <headroom/libtorch/autocast.h>
#include <headroom/libtorch/ops.h>
#include <torch/version.h>

#include <string>

#include "tensors.h"

namespace headroom::libtorch {
namespace {

// The innermost FP16 scope on the CPU of a LibTorch that has no FP16 there; ops.h emulates it.
// Undefined if LibTorch's own autocast is used.
thread_local torch::ScalarType emulated = torch::ScalarType::Undefined;

bool needs_emulation(torch::DeviceType device, torch::ScalarType dtype) {
  return !kNativeHalfOnCpu && device == torch::kCPU && dtype == torch::kHalf;
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)

bool is_enabled(torch::DeviceType device) { return at::autocast::is_autocast_enabled(device); }
void set_enabled(torch::DeviceType device, bool on) {
  at::autocast::set_autocast_enabled(device, on);
}
torch::ScalarType get_dtype(torch::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}
void set_dtype(torch::DeviceType device, torch::ScalarType dtype) {
  at::autocast::set_autocast_dtype(device, dtype);
}

#else  // before 2.4 the CPU and CUDA have separate functions

bool is_enabled(torch::DeviceType device) {
  return device == torch::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
}
void set_enabled(torch::DeviceType device, bool on) {
  device == torch::kCPU ? at::autocast::set_cpu_enabled(on) : at::autocast::set_enabled(on);
}
torch::ScalarType get_dtype(torch::DeviceType device) {
  return device == torch::kCPU ? at::autocast::get_autocast_cpu_dtype()
                               : at::autocast::get_autocast_gpu_dtype();
}
void set_dtype(torch::DeviceType device, torch::ScalarType dtype) {
  device == torch::kCPU ? at::autocast::set_autocast_cpu_dtype(dtype)
                        : at::autocast::set_autocast_gpu_dtype(dtype);
}

#endif

// Throws unless autocast supports this device and type.
torch::DeviceType checked(torch::Device device, torch::ScalarType dtype) {
  if (!device.is_cpu() && !device.is_cuda()) {
    internal::unsupported("Autocast does not support device " + device.str() +
                          "; use cpu or cuda.");
  }
  if (dtype != torch::kHalf && dtype != torch::kBFloat16) {
    throw Error(ErrorCode::kInvalidArgument, std::string("Autocast does not support type ") +
                                                 torch::toString(dtype) +
                                                 "; use torch::kHalf or torch::kBFloat16.");
  }
  return device.type();
}

}  // namespace

Autocast::Autocast(torch::Device device)
    : Autocast(device, device.is_cuda() ? torch::kHalf : torch::kBFloat16) {}

Autocast::Autocast(torch::Device device, torch::ScalarType dtype, bool enabled, bool cache)
    : device_(checked(device, dtype)),
      enabled_before_(is_enabled(device_)),
      cache_before_(at::autocast::is_autocast_cache_enabled()),
      dtype_before_(get_dtype(device_)),
      emulated_before_(emulated) {
  // With emulation LibTorch's own autocast is off, and its dtype is left alone.
  const bool emulate = needs_emulation(device_, dtype);
  if (device_ == torch::kCPU) {
    emulated = emulate && enabled ? dtype : torch::ScalarType::Undefined;
  }
  if (!emulate) set_dtype(device_, dtype);
  set_enabled(device_, enabled && !emulate);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(cache);
}

// Like torch.autocast, drops the cached 16-bit weights at the end of the outermost scope.
Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(cache_before_);
  set_enabled(device_, enabled_before_);
  set_dtype(device_, dtype_before_);
  emulated = emulated_before_;
}

torch::ScalarType Autocast::active(torch::Device device) {
  if (device.is_cpu() && emulated != torch::ScalarType::Undefined) return emulated;
  return is_enabled(device.type()) ? get_dtype(device.type()) : torch::kFloat;
}

}  // namespace headroom::libtorch
