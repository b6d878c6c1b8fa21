// NcclRanks: one reduction is two all-reduces of doubles, sums and maxima, in one NCCL group.
#include <cuda_runtime.h>
#include <headroom/error.h>
#include <headroom/nccl.h>

#include <string>
#include <thread>

namespace headroom::nccl {
namespace {

constexpr size_t kCapacity = 1024;  // doubles of one reduction from the host
constexpr auto kPollInterval = std::chrono::microseconds(20);

// ncclInProgress is no error: it is the normal result of a nonblocking communicator.
void check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const bool misuse = result == ncclInvalidArgument || result == ncclInvalidUsage;
  throw Error(misuse ? ErrorCode::kInvalidArgument : ErrorCode::kRankLost,
              std::string(call) + " failed: " + ncclGetErrorString(result) +
                  "; set NCCL_DEBUG=WARN for details.");
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw Error(
      error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kUnsupported,
      std::string(call) + " failed: " + cudaGetErrorString(error) + ".");
}

// Checks a call of NCCL or CUDA; the error message contains its source text.
#define HEADROOM_CHECK(call) check((call), #call)

// Makes the communicator's device the current one, and restores the previous one at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    HEADROOM_CHECK(cudaGetDevice(&before_));
    HEADROOM_CHECK(cudaSetDevice(device));
  }
  ~DeviceScope() { cudaSetDevice(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

}  // namespace

// Memory and stream for reductions from the host.
struct NcclRanks::Exchange {
  int device = 0;
  double* memory = nullptr;  // on the device
  cudaStream_t stream = nullptr;
  bool lost = false;

  ~Exchange() {
    if (lost) return;  // pending work may still use them: leak
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaFree(memory);
  }
};

NcclRanks::NcclRanks(ncclComm_t communicator, std::chrono::milliseconds time_limit)
    : communicator_(communicator),
      time_limit_(time_limit),
      exchange_(std::make_unique<Exchange>()) {
  if (time_limit <= std::chrono::milliseconds(0)) {
    throw Error(ErrorCode::kInvalidArgument, "NcclRanks needs a time limit above 0.");
  }
  HEADROOM_CHECK(ncclCommUserRank(communicator, &rank_));
  HEADROOM_CHECK(ncclCommCount(communicator, &size_));
  HEADROOM_CHECK(ncclCommCuDevice(communicator, &exchange_->device));
  const DeviceScope scope(exchange_->device);
  HEADROOM_CHECK(cudaMalloc(&exchange_->memory, kCapacity * sizeof(double)));
  HEADROOM_CHECK(cudaStreamCreateWithFlags(&exchange_->stream, cudaStreamNonBlocking));
}

NcclRanks::~NcclRanks() = default;

// In one group, so that NCCL launches both all-reduces together. In place: nothing is allocated,
// and the calls can be captured in a CUDA graph.
void NcclRanks::enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
                        void* stream) {
  const auto to = static_cast<cudaStream_t>(stream);
  HEADROOM_CHECK(ncclGroupStart());
  HEADROOM_CHECK(ncclAllReduce(sums, sums, sum_count, ncclFloat64, ncclSum, communicator_, to));
  HEADROOM_CHECK(
      ncclAllReduce(maxima, maxima, maximum_count, ncclFloat64, ncclMax, communicator_, to));
  HEADROOM_CHECK(ncclGroupEnd());
}

// Copies to the device, enqueues on a stream of its own, and polls until done or the limit is
// reached.
void NcclRanks::reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) {
  Exchange& exchange = *exchange_;
  if (exchange.lost) throw_lost_before();
  if (sum_count + maximum_count > kCapacity) {
    throw Error(ErrorCode::kInvalidArgument,
                "NcclRanks reduces " + std::to_string(kCapacity) + " numbers at most.");
  }
  const DeviceScope scope(exchange.device);
  double* const device_memory = exchange.memory;
  const auto copy = [&](double* to, const double* from, size_t count) {
    HEADROOM_CHECK(
        cudaMemcpyAsync(to, from, count * sizeof(double), cudaMemcpyDefault, exchange.stream));
  };
  exchange.lost = true;  // cleared on success
  copy(device_memory, sums, sum_count);
  copy(device_memory + sum_count, maxima, maximum_count);
  enqueue(device_memory, sum_count, device_memory + sum_count, maximum_count, exchange.stream);
  // Polls, because cudaStreamSynchronize() would never return after a rank is lost.
  const auto start = std::chrono::steady_clock::now();
  for (cudaError_t state; (state = cudaStreamQuery(exchange.stream)) != cudaSuccess;) {
    if (state != cudaErrorNotReady) check(state, "cudaStreamQuery");
    ncclResult_t result = ncclSuccess;
    HEADROOM_CHECK(ncclCommGetAsyncError(communicator_, &result));
    check(result, "An all-reduce");
    if (std::chrono::steady_clock::now() - start > time_limit_) {
      throw_did_not_come("within " + std::to_string(time_limit_.count()) + " ms");
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  copy(sums, device_memory, sum_count);
  copy(maxima, device_memory + sum_count, maximum_count);
  HEADROOM_CHECK(cudaStreamSynchronize(exchange.stream));
  exchange.lost = false;
}

}  // namespace headroom::nccl
