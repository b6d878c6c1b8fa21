// The cost of agreement over NCCL on a CUDA device: alternates the same step with and without it.
// With one device there is one rank, so the figure contains everything but the network.
//     headroom_nccl_bench
#include <cuda_runtime.h>
#include <headroom/headroom.h>
#include <headroom/nccl.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

namespace hr = headroom;

namespace {

constexpr hr::Device kDevice{hr::DeviceType::kCUDA, 0};
constexpr int kTensors = 161;
constexpr int64_t kCount = 4096;

class Training {
 public:
  explicit Training(std::shared_ptr<hr::Ranks> ranks)
      : scaler_(hr::DynamicScale{}, {.device = kDevice, .ranks = std::move(ranks)}) {
    const size_t floats = 2 * kTensors * kCount + 2;
    cudaMalloc(&memory_, floats * sizeof(float));
    cudaMemset(memory_, 1, floats * sizeof(float));
    std::vector<hr::Parameter> parameters;
    for (int i = 0; i < kTensors; ++i) {
      float* const weight = memory_ + 2 + 2 * i * kCount;
      parameters.push_back({std::to_string(i), hr::view(weight, hr::DType::kF32, kCount, kDevice),
                            hr::view(weight + kCount, hr::DType::kF32, kCount, kDevice)});
    }
    optimizer_ = std::make_unique<hr::AdamW>(parameters);
    scaler_.device_scale();  // the loss is scaled outside of the scaler
  }
  ~Training() { cudaFree(memory_); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void step() {
    scaler_.step(*optimizer_, {.max_norm = 1.0f});
    scaler_.update();
  }

 private:
  float* memory_ = nullptr;
  std::unique_ptr<hr::AdamW> optimizer_;
  hr::GradScaler scaler_;
};

// Times a step, eager or as a CUDA graph.
class StepTimer {
 public:
  StepTimer(Training* training, cudaStream_t stream, bool as_graph)
      : training_(training), stream_(stream) {
    training->step();
    cudaStreamSynchronize(stream);
    if (!as_graph) return;
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    training->step();
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
  }

  float microseconds() {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    cudaStreamSynchronize(stream_);
    cudaEventRecord(begin, stream_);
    if (graph_ != nullptr) {
      cudaGraphLaunch(graph_, stream_);
    } else {
      training_->step();
    }
    cudaEventRecord(end, stream_);
    cudaEventSynchronize(end);
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, begin, end);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return 1000.0f * ms;
  }

 private:
  Training* training_;
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main() {
  ncclComm_t communicator = nullptr;
  if (ncclCommInitAll(&communicator, 1, nullptr) != ncclSuccess) {
    std::fprintf(stderr, "NCCL cannot be started here.\n");
    return 1;
  }
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  const hr::StreamScope scope(stream);
  Training alone(nullptr), together(std::make_shared<hr::nccl::NcclRanks>(communicator));
  for (const bool as_graph : {false, true}) {
    StepTimer one(&alone, stream, as_graph), two(&together, stream, as_graph);
    std::vector<float> one_times, two_times;
    for (int i = 0; i < 200; ++i) {
      one_times.push_back(one.microseconds());
      two_times.push_back(two.microseconds());
    }
    const float a = median(one_times), b = median(two_times);
    std::printf("%-6s step of %d tensors alone %6.1f us, agreed over NCCL %6.1f us: %+.1f us\n",
                as_graph ? "graph" : "eager", kTensors, a, b, b - a);
  }
}
