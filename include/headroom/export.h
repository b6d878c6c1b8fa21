// Macros: HEADROOM_API for symbols that the shared library exports, HEADROOM_HOST_DEVICE for
// functions that nvcc also compiles for the device.
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
