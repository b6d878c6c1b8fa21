// Finds out where an address points by a query of CUDA's driver. For a view on the CPU the driver
// is used only if this process has loaded it already, so that a CPU program never initialises CUDA.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>

#include "core/cuda.h"

namespace headroom::internal {
namespace {

using Query = decltype(&cuPointerGetAttributes);

// How many libraries this process has loaded so far.
uint64_t libraries_loaded() {
  uint64_t loads = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uint64_t*>(out) = info->dlpi_adds;
        return 1;  // the first entry is enough
      },
      &loads);
  return loads;
}

// The driver's query function, or null as long as the driver is not loaded. A dlopen() that finds
// nothing takes 40 microseconds, so it is repeated only if libraries were loaded since the last
// attempt; that check takes 20 nanoseconds. Relaxed ordering is enough: threads that race here
// store the same values.
Query loaded_query() {
  static std::atomic<Query> found = nullptr;
  static std::atomic<uint64_t> loads_at_last_attempt = 0;
  const Query query = found.load(std::memory_order_relaxed);
  if (query != nullptr) return query;
  const uint64_t loads = libraries_loaded();
  if (loads_at_last_attempt.load(std::memory_order_relaxed) == loads) return nullptr;
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);  // never closed
  loads_at_last_attempt.store(loads, std::memory_order_relaxed);
  if (driver == nullptr) return nullptr;
  const auto symbol = reinterpret_cast<Query>(dlsym(driver, "cuPointerGetAttributes"));
  found.store(symbol, std::memory_order_relaxed);
  return symbol;
}

// kUnknown if the driver is not loaded or not initialised. There is no CUDA memory then.
MemoryPlace query_driver(const void* data) {
  const Query query = loaded_query();
  if (query == nullptr) return {};
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  uint32_t type = 0;
  uint32_t managed = 0;
  int device = 0;
  void* values[] = {&type, &managed, &device};
  if (query(3, attributes, values, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS) return {};
  if (managed != 0) return {MemoryKind::kManaged, device};
  if (type == CU_MEMORYTYPE_DEVICE) return {MemoryKind::kDevice, device};
  if (type == CU_MEMORYTYPE_HOST) return {MemoryKind::kPinned, device};
  return {MemoryKind::kPageable, 0};
}

// The same for a view that names a CUDA device. May initialise that device, which is about to be
// used anyway.
MemoryPlace query_runtime(const void* data, int device) {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return {};
  cudaPointerAttributes found = {};
  const bool known = (device == before || cudaSetDevice(device) == cudaSuccess) &&
                     cudaPointerGetAttributes(&found, data) == cudaSuccess;
  if (device != before) cudaSetDevice(before);
  cudaGetLastError();  // clears the error; the first call that needs the device reports it
  if (!known) return {};
  switch (found.type) {
    case cudaMemoryTypeHost:
      return {MemoryKind::kPinned, found.device};
    case cudaMemoryTypeDevice:
      return {MemoryKind::kDevice, found.device};
    case cudaMemoryTypeManaged:
      return {MemoryKind::kManaged, found.device};
    default:
      return {MemoryKind::kPageable, 0};
  }
}

}  // namespace

bool cuda_loaded() { return loaded_query() != nullptr; }

MemoryPlace memory_place(const TensorView& view) {
  const MemoryPlace place = query_driver(view.data);
  if (place.kind != MemoryKind::kUnknown || view.device.type == DeviceType::kCPU) return place;
  return query_runtime(view.data, view.device.index);
}

bool reads_pageable_memory(int device) {
  int yes = 0;
  const bool known =
      cudaDeviceGetAttribute(&yes, cudaDevAttrPageableMemoryAccess, device) == cudaSuccess;
  if (!known) cudaGetLastError();
  return known && yes != 0;
}

}  // namespace headroom::internal
