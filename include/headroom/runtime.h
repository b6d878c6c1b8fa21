// How the library runs on this machine: threads, SIMD instructions, CUDA streams.
#ifndef HEADROOM_RUNTIME_H_
#define HEADROOM_RUNTIME_H_

#include <headroom/export.h>

#include <string>
#include <vector>

namespace headroom {

/// Number of threads a call may use; 0 restores the default (OpenMP's: OMP_NUM_THREADS, or one per
/// core). The results of every function are the same bits for any number of threads. A process that
/// was forked after the library was loaded works on one thread, whatever is set: OpenMP's threads
/// do not survive fork(). A program started by exec, or by Python's "spawn", is not affected.
HEADROOM_API void set_num_threads(int threads);
HEADROOM_API int num_threads();

/// The SIMD instruction set in use, for example "AVX2". The best one the CPU has, unless the
/// environment variable HEADROOM_SIMD names another (upper or lower case) before the first call.
HEADROOM_API std::string simd_target();

/// All SIMD instruction sets that were compiled in and that this CPU can run, best first.
HEADROOM_API std::vector<std::string> simd_targets();

/// Uses the named one from now on, in all threads. Throws Error(kInvalidArgument) if it is not in
/// simd_targets(). Not to be called while another thread is inside the library.
HEADROOM_API void set_simd_target(const std::string& name);

/// Whether this build has CUDA and there is a device to use.
HEADROOM_API bool cuda_available();

/// As long as it lives, everything that this thread asks of CUDA tensors is enqueued on this stream
/// (a cudaStream_t). Outside of any it is the default stream. Scopes nest.
class HEADROOM_API StreamScope {
 public:
  explicit StreamScope(void* cuda_stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  void* stream_before_;
  void* (*stream_of_before_)(int device);
};

/// The same where every device has a current stream of its own, as in LibTorch: work on CUDA device
/// `d` is enqueued on stream_of(d), which is asked whenever something is enqueued. Nests with
/// StreamScope; the innermost of both counts.
class HEADROOM_API StreamLookupScope {
 public:
  using StreamOf = void* (*)(int device);
  explicit StreamLookupScope(StreamOf stream_of);
  ~StreamLookupScope();
  StreamLookupScope(const StreamLookupScope&) = delete;
  StreamLookupScope& operator=(const StreamLookupScope&) = delete;

 private:
  void* stream_before_;
  StreamOf stream_of_before_;
};

}  // namespace headroom

#endif  // HEADROOM_RUNTIME_H_
