// Marks what the shared library exports, and what also compiles for CUDA devices.
#ifndef HEADROOM_EXPORT_H_
#define HEADROOM_EXPORT_H_

#if defined(_WIN32)
#define HEADROOM_API
#else
#define HEADROOM_API __attribute__((visibility("default")))
#endif

#if defined(__CUDACC__)
#define HEADROOM_HOST_DEVICE __host__ __device__
#else
#define HEADROOM_HOST_DEVICE
#endif

#endif  // HEADROOM_EXPORT_H_
