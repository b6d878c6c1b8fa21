// Calls outside of a step that initialise device memory complete before they return, so that the
// next step may use any stream.
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
class NonBlockingStream {
 public:
  NonBlockingStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~NonBlockingStream() { cudaStreamDestroy(stream_); }
  NonBlockingStream(const NonBlockingStream&) = delete;
  NonBlockingStream& operator=(const NonBlockingStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Keeps a stream busy during its lifetime: a pause of 20 ms runs and another one is enqueued. Work
// enqueued meanwhile is therefore incomplete when the enqueuing call returns.
class BusyStream {
 public:
  explicit BusyStream(cudaStream_t stream) : thread_([this, stream] { run(stream); }) {
    while (started_ < 1 && !stop_) std::this_thread::yield();
    EXPECT_FALSE(stop_) << "cudaLaunchHostFunc failed";
  }
  ~BusyStream() {
    stop_ = true;
    thread_.join();
  }
  BusyStream(const BusyStream&) = delete;
  BusyStream& operator=(const BusyStream&) = delete;

 private:
  static void pause(void* self) {
    ++static_cast<BusyStream*>(self)->started_;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  void run(cudaStream_t stream) {
    for (int enqueued = 0; !stop_; ++enqueued) {
      if (cudaLaunchHostFunc(stream, pause, this) != cudaSuccess) stop_ = true;
      while (started_ < enqueued && !stop_) std::this_thread::yield();
    }
    cudaStreamSynchronize(stream);  // enqueued pauses refer to this object
  }

  std::atomic<int> started_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// The bytes as work enqueued on `stream` now would read them.
std::vector<unsigned char> bytes_on(cudaStream_t stream, const void* data, size_t bytes) {
  std::vector<unsigned char> copy(bytes);
  EXPECT_EQ(cudaMemcpyAsync(copy.data(), data, bytes, cudaMemcpyDefault, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return copy;
}

// One f16 parameter on the CPU and its copy on the device. Each test runs the calls under test once
// before it keeps the stream busy: the first launch of a kernel loads it, which synchronises with
// the device and would hide a missing synchronisation.
struct HostAndDevice {
  HostTensor weight{DType::kF16, 300000, 1};
  HostTensor grad{DType::kF16, 300000, 2};
  DeviceCopy device_weight{weight.view()};
  DeviceCopy device_grad{grad.view()};
  std::vector<Parameter> host() { return {{"w", weight.view(), grad.view()}}; }
  std::vector<Parameter> device() { return {{"w", device_weight.view(), device_grad.view()}}; }
};

std::vector<unsigned char> master_bytes(const AdamW& optimizer) {
  return bytes_at(view(optimizer.master(0), optimizer.parameters()[0].weight.count));
}

TEST_F(Cuda, ConstructorStateIsVisibleOnOtherStreams) {
  HostAndDevice parameter;
  AdamW host(parameter.host()), loads_kernels(parameter.device());
  const auto master = master_bytes(host);
  host.apply(0.5f, false);
  const NonBlockingStream first, second;
  const BusyStream busy(first);
  std::unique_ptr<AdamW> device;
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    device = std::make_unique<AdamW>(parameter.device());
  }
  EXPECT_TRUE(bytes_on(second, device->master(0), master.size()) == master);
  const StreamScope scope(static_cast<cudaStream_t>(second));
  device->apply(0.5f, false);
  EXPECT_TRUE(bytes_on(second, parameter.device_weight.view().data,
                       parameter.weight.view().bytes()) == bytes_at(parameter.weight.view()));
}

TEST_F(Cuda, AddedGroupIsVisibleOnOtherStreams) {
  HostAndDevice parameter, more;
  AdamW host(more.host()), device(parameter.device());
  const NonBlockingStream first, second;
  const BusyStream busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    device.add_group(more.device(), {});
  }
  const auto master = master_bytes(host);
  EXPECT_TRUE(bytes_on(second, device.master(1), master.size()) == master);
}

TEST_F(Cuda, LoadedStateIsVisibleOnOtherStreams) {
  HostAndDevice parameter;
  AdamW host(parameter.host()), device(parameter.device());
  device.load_state(host.state());
  host.apply(0.5f, false);  // the weights on the device do not have this step yet
  const NonBlockingStream first, second;
  const BusyStream busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    device.load_state(host.state());
  }
  EXPECT_TRUE(bytes_on(second, parameter.device_weight.view().data,
                       parameter.weight.view().bytes()) == bytes_at(parameter.weight.view()));
}

TEST_F(Cuda, RefreshedMastersAreVisibleOnOtherStreams) {
  HostAndDevice parameter, other;
  other.weight.refill(7, 3.0);
  other.device_weight.write(other.weight.view());
  AdamW host(other.host()), rebound(parameter.device());
  const auto master = master_bytes(host);
  const NonBlockingStream first, second;
  const BusyStream busy(first);
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    rebound.rebind(other.device());
  }
  EXPECT_TRUE(bytes_on(second, rebound.master(0), master.size()) == master);
  HostAndDevice third;
  AdamW refreshed(third.device());
  third.device_weight.write(other.weight.view());
  {
    const StreamScope scope(static_cast<cudaStream_t>(first));
    refreshed.refresh_masters();
  }
  EXPECT_TRUE(bytes_on(second, refreshed.master(0), master.size()) == master);
}

thread_local std::vector<int> requested_devices;
thread_local cudaStream_t lookup_result = nullptr;

void* look_up(int device) {
  requested_devices.push_back(device);
  return lookup_result;
}

// The number of operations that the call enqueues on this stream, counted by capturing a graph.
size_t count_enqueued(cudaStream_t stream, const std::function<void()>& call) {
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  call();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  cudaGraphDestroy(graph);
  return nodes;
}

TEST_F(Cuda, StreamLookupReceivesTheTensorsDevice) {
  const HostTensor half(DType::kF16, 100, 1), wide(DType::kF32, 100, 2);
  const DeviceCopy from(half.view()), to(wide.view());
  const NonBlockingStream first, second;
  const StreamScope outer(static_cast<cudaStream_t>(second));
  {
    lookup_result = first;
    requested_devices.clear();
    const StreamScope scope{Stream(look_up)};
    EXPECT_EQ(count_enqueued(first, [&] { convert(from.view(), to.view()); }), 1u);
    EXPECT_EQ(requested_devices, std::vector<int>{0});
    const StreamScope inner(static_cast<cudaStream_t>(second));
    EXPECT_EQ(count_enqueued(second, [&] { convert(from.view(), to.view()); }), 1u);
    EXPECT_EQ(requested_devices.size(), 1u) << "the innermost scope applies";
  }
  EXPECT_EQ(count_enqueued(second, [&] { convert(from.view(), to.view()); }), 1u);
  EXPECT_EQ(requested_devices.size(), 1u);
}

TEST_F(Cuda, TrainingStepUsesTheStreamLookup) {
  HostAndDevice parameter;
  AdamW host(parameter.host());
  GradScaler plain;
  plain.scale(1.0f);
  plain.step(host);
  const NonBlockingStream stream;
  lookup_result = stream;
  const StreamScope scope{Stream(look_up)};
  AdamW device(parameter.device());
  GradScaler scaler(DynamicScale{}, {.device = {DeviceType::kCUDA, 0}});
  const HostTensor one(DType::kF32, 1, 3);
  const DeviceCopy loss(one.view()), scaled(one.view());
  requested_devices.clear();
  scaler.scale(loss.view(), scaled.view());
  scaler.step(device);
  scaler.update();
  EXPECT_TRUE(scaler.report().applied);
  EXPECT_FALSE(requested_devices.empty());
  for (const int requested : requested_devices) EXPECT_EQ(requested, 0);
  EXPECT_TRUE(parameter.device_weight.bytes() == bytes_at(parameter.weight.view()));
}

}  // namespace
}  // namespace headroom
