#include "tests/cuda/fake_driver.h"

#include <cuda.h>

#include <vector>

namespace {

struct Range {
  CUdeviceptr begin;
  size_t bytes;
  FakeKind kind;
  int device;
};
std::vector<Range>& ranges() {
  static std::vector<Range> all;
  return all;
}
int queries = 0;

}  // namespace

extern "C" {

void fake_driver_add(const void* begin, size_t bytes, FakeKind kind, int device) {
  ranges().push_back({reinterpret_cast<CUdeviceptr>(begin), bytes, kind, device});
}

void fake_driver_clear() { ranges().clear(); }

int fake_driver_queries() { return queries; }

// Like the real driver, returns zeros and no error for an unknown address.
CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes,
                                        void** values, CUdeviceptr address) {
  ++queries;
  const Range* found = nullptr;
  for (const Range& range : ranges()) {
    if (address >= range.begin && address < range.begin + range.bytes) found = &range;
  }
  for (unsigned i = 0; i < count; ++i) {
    int value = 0;
    if (found != nullptr && attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
      value = found->kind == FakeKind::kPinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    }
    if (found != nullptr && attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
      value = found->kind == FakeKind::kManaged;
    }
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      value = found != nullptr ? found->device : -2;
    }
    *static_cast<int*>(values[i]) = value;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
