// A fake CUDA driver, to test the library's pointer queries on machines without a GPU. The test
// links it as libcuda.so.1, so the library finds it as the driver that this process has loaded.
#ifndef HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_
#define HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_

#include <cstddef>

enum class FakeKind { kPinned, kManaged, kDevice };

extern "C" {
/// Reports these bytes of host memory as memory of this kind and device from now on.
void fake_driver_add(const void* begin, size_t bytes, FakeKind kind, int device);
void fake_driver_clear();

/// The number of pointer queries so far.
int fake_driver_queries();
}

#endif  // HEADROOM_TESTS_CUDA_FAKE_DRIVER_H_
