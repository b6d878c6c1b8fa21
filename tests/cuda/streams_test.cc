// What is initialised outside of a step is complete when the call returns, whatever stream steps
// next.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "tests/cuda/support.h"

namespace headroom {
namespace {

// A stream that is not ordered with the default stream.
class OwnStream {
 public:
  OwnStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// As long as it lives, the stream pauses all the time: one pause of 20 ms runs and the next one is
// enqueued. What is enqueued meanwhile is therefore not done when the enqueuing call returns.
class KeptBusy {
 public:
  explicit KeptBusy(cudaStream_t stream) : thread_([this, stream] { run(stream); }) {
    while (begun_ < 1 && !stop_) std::this_thread::yield();
    EXPECT_FALSE(stop_) << "nothing can be enqueued";
  }
  ~KeptBusy() {
    stop_ = true;
    thread_.join();
  }
  KeptBusy(const KeptBusy&) = delete;
  KeptBusy& operator=(const KeptBusy&) = delete;

 private:
  static void pause(void* self) {
    ++static_cast<KeptBusy*>(self)->begun_;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  void run(cudaStream_t stream) {
    for (int enqueued = 0; !stop_; ++enqueued) {
      if (cudaLaunchHostFunc(stream, pause, this) != cudaSuccess) stop_ = true;
      while (begun_ < enqueued && !stop_) std::this_thread::yield();
    }
    cudaStreamSynchronize(stream);  // pauses that are enqueued use this object
  }

  std::atomic<int> begun_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// The values on the device as they are for `stream` at this moment.
std::vector<unsigned char> bytes_on(cudaStream_t stream, const void* data, size_t bytes) {
  std::vector<unsigned char> copy(bytes);
  EXPECT_EQ(cudaMemcpyAsync(copy.data(), data, bytes, cudaMemcpyDefault, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return copy;
}

// One f16 parameter on the CPU, and its copy on the device. Each test makes the calls that it is
// about once before it keeps the stream busy: the first launch of a kernel loads it, which waits
// for the device and would hide a wait that is missing.
struct Both {
  Host weight{DType::kF16, 300000, 1};
  Host grad{DType::kF16, 300000, 2};
  OnDevice weight_there{weight.view()};
  OnDevice grad_there{grad.view()};
  std::vector<Parameter> here() { return {{"w", weight.view(), grad.view()}}; }
  std::vector<Parameter> there() { return {{"w", weight_there.view(), grad_there.view()}}; }
};

std::vector<unsigned char> master_bytes(const AdamW& optimizer) {
  return bytes_at(view(optimizer.master(0), optimizer.parameters()[0].weight.count));
}

TEST_F(Cuda, AStepOnAnotherStreamFindsWhatTheConstructorMade) {
  Both both;
  AdamW here(both.here()), loads_kernels(both.there());
  const auto master = master_bytes(here);
  here.apply(0.5f, false);
  const OwnStream first, second;
  const KeptBusy busy(first);
  std::unique_ptr<AdamW> there;
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    there = std::make_unique<AdamW>(both.there());
  }
  EXPECT_TRUE(bytes_on(second, there->master(0), master.size()) == master);
  const StreamScope scope(static_cast<cudaStream_t>(second));
  there->apply(0.5f, false);
  EXPECT_TRUE(bytes_on(second, both.weight_there.view().data, both.weight.view().bytes()) ==
              bytes_at(both.weight.view()));
}

TEST_F(Cuda, AStepOnAnotherStreamFindsAGroupThatWasAdded) {
  Both both, more;
  AdamW here(more.here()), there(both.there());
  const OwnStream first, second;
  const KeptBusy busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    there.add_group(more.there(), {});
  }
  const auto master = master_bytes(here);
  EXPECT_TRUE(bytes_on(second, there.master(1), master.size()) == master);
}

TEST_F(Cuda, AStepOnAnotherStreamFindsAStateThatWasLoaded) {
  Both both;
  AdamW here(both.here()), there(both.there());
  there.load_state(here.state());
  here.apply(0.5f, false);  // the weights on the device are still those before
  const OwnStream first, second;
  const KeptBusy busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    there.load_state(here.state());
  }
  EXPECT_TRUE(bytes_on(second, both.weight_there.view().data, both.weight.view().bytes()) ==
              bytes_at(both.weight.view()));
}

TEST_F(Cuda, AStepOnAnotherStreamFindsMastersThatFollowedTheWeights) {
  Both both, other;
  other.weight.refill(7, 3.0);
  other.weight_there.put(other.weight.view());
  AdamW here(other.here()), rebound(both.there());
  const auto master = master_bytes(here);
  const OwnStream first, second;
  const KeptBusy busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    rebound.rebind(other.there());
  }
  EXPECT_TRUE(bytes_on(second, rebound.master(0), master.size()) == master);
  Both third;
  AdamW refreshed(third.there());
  third.weight_there.put(other.weight.view());
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    refreshed.refresh_masters();
  }
  EXPECT_TRUE(bytes_on(second, refreshed.master(0), master.size()) == master);
}

thread_local std::vector<int> asked_devices;
thread_local cudaStream_t looked_up = nullptr;

void* look_up(int device) {
  asked_devices.push_back(device);
  return looked_up;
}

// What the call enqueues on this stream, as nodes of a graph.
size_t enqueued_on(cudaStream_t stream, const std::function<void()>& call) {
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  call();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  cudaGraphDestroy(graph);
  return nodes;
}

TEST_F(Cuda, AStreamLookupIsAskedForTheTensorsDevice) {
  const Host half(DType::kF16, 100, 1), wide(DType::kF32, 100, 2);
  const OnDevice from(half.view()), to(wide.view());
  const OwnStream first, second;
  const StreamScope outer(static_cast<cudaStream_t>(second));
  {
    looked_up = first;
    asked_devices.clear();
    const StreamScope scope{Stream(look_up)};
    EXPECT_EQ(enqueued_on(first, [&] { convert(from.view(), to.view()); }), 1u);
    EXPECT_EQ(asked_devices, std::vector<int>{0});
    const StreamScope inner(static_cast<cudaStream_t>(second));
    EXPECT_EQ(enqueued_on(second, [&] { convert(from.view(), to.view()); }), 1u);
    EXPECT_EQ(asked_devices.size(), 1u) << "the innermost scope counts";
  }
  EXPECT_EQ(enqueued_on(second, [&] { convert(from.view(), to.view()); }), 1u);
  EXPECT_EQ(asked_devices.size(), 1u);
}

TEST_F(Cuda, AWholeTrainingStepRunsUnderAStreamLookup) {
  Both both;
  AdamW here(both.here());
  GradScaler plain;
  plain.scale(1.0f);
  plain.step(here);
  const OwnStream stream;
  looked_up = stream;
  const StreamScope scope{Stream(look_up)};
  AdamW there(both.there());
  GradScaler scaler(DynamicScale{}, {.device = {DeviceType::kCUDA, 0}});
  const Host one(DType::kF32, 1, 3);
  const OnDevice loss(one.view()), scaled(one.view());
  asked_devices.clear();
  scaler.scale(loss.view(), scaled.view());
  scaler.step(there);
  scaler.update();
  EXPECT_TRUE(scaler.report().applied);
  EXPECT_FALSE(asked_devices.empty());
  for (const int device : asked_devices) EXPECT_EQ(device, 0);
  EXPECT_TRUE(both.weight_there.bytes() == bytes_at(both.weight.view()));
}

}  // namespace
}  // namespace headroom
