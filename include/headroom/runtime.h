// How the library runs on this machine: threads and SIMD instructions.
#ifndef HEADROOM_RUNTIME_H_
#define HEADROOM_RUNTIME_H_

#include <headroom/export.h>

#include <string>
#include <vector>

namespace headroom {

/// Number of threads a call may use; 0 restores the default (OpenMP's: OMP_NUM_THREADS, or one per
/// core). The results of every function are the same bits for any number of threads.
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

}  // namespace headroom

#endif  // HEADROOM_RUNTIME_H_
