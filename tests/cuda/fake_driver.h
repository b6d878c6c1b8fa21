// A stand-in for CUDA's driver, to test on any machine what the library asks of it. The test links
// it as libcuda.so.1; to the library it is the driver that this process has loaded.
#ifndef HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_
#define HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_

#include <cstddef>

enum class FakeKind { kPinned, kManaged, kDevice };

extern "C" {
/// From now on these bytes of host memory are said to be memory of this kind and device.
void fake_driver_add(const void* begin, size_t bytes, FakeKind kind, int device);
void fake_driver_clear();

/// Questions that were asked so far.
int fake_driver_queries();
}

#endif  // HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_
