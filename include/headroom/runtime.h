// How the library runs on this machine: threads, SIMD instructions, CUDA streams.
#ifndef HEADROOM_RUNTIME_H_
#define HEADROOM_RUNTIME_H_

#include <headroom/export.h>

#include <cstddef>
#include <string>
#include <vector>

namespace headroom {

/// Number of threads that a call may use; 0 restores the default (OpenMP's: OMP_NUM_THREADS, or one
/// per core). Results are the same bits for any number of threads. A process that was forked after
/// the library was loaded always uses one thread, because OpenMP's threads do not survive fork().
/// Processes started with exec, or with Python's "spawn", are not affected.
HEADROOM_API void set_num_threads(int threads);
HEADROOM_API int num_threads();

/// The SIMD instruction set in use, for example "AVX2": the best one that the CPU supports, unless
/// the environment variable HEADROOM_SIMD names another (upper or lower case) before the first
/// call.
HEADROOM_API std::string simd_target();

/// All SIMD instruction sets that were compiled in and that this CPU supports, best first.
HEADROOM_API std::vector<std::string> simd_targets();

/// Selects an instruction set for all threads. Throws Error(kInvalidArgument) if it is not in
/// simd_targets(). Must not be called while another thread is inside the library.
HEADROOM_API void set_simd_target(const std::string& name);

/// Whether this build has CUDA and there is a usable device.
HEADROOM_API bool cuda_available();

/// The CUDA stream that work is enqueued on. A default-constructed Stream means that of the
/// innermost StreamScope; outside of any scope, CUDA's default stream.
class HEADROOM_API Stream {
 public:
  /// Returns the current stream of a device.
  using OfDevice = void* (*)(int device);

  Stream() = default;
  /// This cudaStream_t, or null for the default stream.
  Stream(void* cuda_stream)
      : kind_(Kind::kStream), stream_(cuda_stream) {}  // NOLINT: a cudaStream_t
  Stream(std::nullptr_t) : kind_(Kind::kStream) {}     // NOLINT: the default stream
  /// For frameworks with a current stream per device, as in LibTorch: work on CUDA device `d` is
  /// enqueued on of_device(d), which is called every time something is enqueued.
  explicit Stream(OfDevice of_device) : kind_(Kind::kOfDevice), of_device_(of_device) {}

  /// Whether a stream was given.
  bool given() const { return kind_ != Kind::kNone; }

  /// The cudaStream_t for work on this device.
  void* on(int device) const { return kind_ == Kind::kOfDevice ? of_device_(device) : stream_; }

 private:
  enum class Kind : unsigned char { kNone, kStream, kOfDevice };
  Kind kind_ = Kind::kNone;
  void* stream_ = nullptr;
  OfDevice of_device_ = nullptr;
};

/// Within its scope, calls of this thread without a stream argument use this stream. Scopes nest.
class HEADROOM_API StreamScope {
 public:
  explicit StreamScope(Stream stream);  // a default-constructed Stream changes nothing
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Stream before_;
};

}  // namespace headroom

#endif  // HEADROOM_RUNTIME_H_
