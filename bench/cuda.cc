// Scaled steps on a CUDA device, compared with a device-to-device copy of the same bytes.
//     headroom_cuda_bench [MODEL [STATE]]
#include <cuda_runtime.h>
#include <headroom/headroom.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace hr = headroom;

namespace {

constexpr hr::Device kDevice{hr::DeviceType::kCUDA, 0};
cudaStream_t stream = nullptr;

std::vector<int64_t> gpt2(int64_t layers, int64_t d) {
  std::vector<int64_t> sizes = {50257 * d, 1024 * d};
  for (int64_t i = 0; i < layers; ++i) {
    for (const int64_t n :
         {d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d}) {
      sizes.push_back(n);
    }
  }
  sizes.push_back(d);
  sizes.push_back(d);
  return sizes;
}

std::vector<int64_t> resnet50() {
  std::vector<int64_t> sizes = {64 * 3 * 49, 64, 64};
  int64_t in = 64;
  const int64_t widths[] = {64, 128, 256, 512}, blocks[] = {3, 4, 6, 3};
  for (int stage = 0; stage < 4; ++stage) {
    const int64_t w = widths[stage];
    for (int64_t i = 0; i < blocks[stage]; ++i) {
      for (const int64_t n : {w * in, w, w, w * w * 9, w, w, 4 * w * w, 4 * w, 4 * w})
        sizes.push_back(n);
      if (i == 0) {
        for (const int64_t n : {4 * w * in, 4 * w, 4 * w}) sizes.push_back(n);
      }
      in = 4 * w;
    }
  }
  sizes.push_back(1000 * 2048);
  sizes.push_back(1000);
  return sizes;
}

// Rank 16 on all linear layers of a model with 7 billion parameters: 448 tensors, 40 million.
std::vector<int64_t> lora() {
  std::vector<int64_t> sizes;
  for (int layer = 0; layer < 32; ++layer) {
    for (const int64_t out : {4096, 4096, 4096, 4096, 11008, 11008}) {
      sizes.push_back(16 * 4096);
      sizes.push_back(16 * out);
    }
    sizes.push_back(16 * 11008);
    sizes.push_back(16 * 4096);
  }
  return sizes;
}

// The median time of single runs, by device events; synchronises before each run.
float median_ms(int times, const std::function<void()>& work) {
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> all;
  for (int i = 0; i < times + 5; ++i) {
    cudaDeviceSynchronize();
    cudaEventRecord(a, stream);
    work();
    cudaEventRecord(b, stream);
    cudaEventSynchronize(b);
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 5) all.push_back(ms);
  }
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::nth_element(all.begin(), all.begin() + static_cast<long>(all.size() / 2), all.end());
  return all[all.size() / 2];
}

// Device memory filled with normal random numbers times `size`. Zeros would make the step faster.
class Tensor {
 public:
  Tensor(hr::DType type, int64_t count, float size) : type_(type), count_(count) {
    cudaMalloc(&data_, static_cast<size_t>(count) * hr::size_of(type));
    static std::vector<float> noise;
    if (noise.empty()) {
      std::mt19937 random(1);
      std::normal_distribution<float> normal;
      noise.resize(1 << 20);
      for (float& x : noise) x = normal(random);
    }
    float* wide = nullptr;
    const int64_t most = static_cast<int64_t>(noise.size());
    std::vector<float> sized(noise.begin(), noise.begin() + std::min(count, most));
    for (float& x : sized) x *= size;
    cudaMalloc(&wide, sized.size() * 4);
    cudaMemcpy(wide, sized.data(), sized.size() * 4, cudaMemcpyDefault);
    for (int64_t at = 0; at < count; at += most) {
      const int64_t n = std::min(most, count - at);
      const hr::TensorView to{
          static_cast<char*>(data_) + static_cast<size_t>(at) * hr::size_of(type), type, n, kDevice,
          false};
      hr::convert({wide, hr::DType::kF32, n, kDevice, true}, to);
    }
    cudaDeviceSynchronize();
    cudaFree(wide);
  }
  ~Tensor() { cudaFree(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  hr::TensorView view() const { return {data_, type_, count_, kDevice, false}; }

 private:
  hr::DType type_;
  int64_t count_;
  void* data_ = nullptr;
};

struct Model {
  const char* name;
  std::vector<int64_t> sizes;
};

// Bytes that a step moves for one parameter: the gradient twice, and weight and state.
double moved_bytes(hr::DType type, hr::StateFormat state) {
  const auto size = static_cast<double>(hr::size_of(type));
  const bool full = state == hr::StateFormat::kFull;
  const double each = full ? 4 : state == hr::StateFormat::kHalf ? 2 : 1;
  const double moments = 4 * each + (state == hr::StateFormat::kByte ? 4.0 / 32 : 0);
  if (type == hr::DType::kF32) return 2 * size + 2 * size + moments;
  return 2 * size + (full ? size : 2 * size) + 2 * each + moments;
}

// Prints one line for a model and type: the step eager and as a CUDA graph, and its stages alone.
void run(const Model& model, hr::DType type, hr::StateFormat state, double copy_speed) {
  std::vector<std::unique_ptr<Tensor>> memory;
  std::vector<hr::Parameter> parameters;
  std::vector<hr::TensorView> grads;
  double total = 0.0;
  for (const int64_t n : model.sizes) {
    memory.push_back(std::make_unique<Tensor>(type, n, 0.02f));
    memory.push_back(std::make_unique<Tensor>(type, n, 65.0f));
    parameters.push_back({"", memory[memory.size() - 2]->view(), memory.back()->view()});
    grads.push_back(memory.back()->view());
    total += static_cast<double>(n);
  }
  hr::AdamW optimizer(parameters, {.lr = 1e-6, .weight_decay = 0.1}, {.state = state});
  hr::GradScaler scaler(hr::DynamicScale{}, {.device = kDevice});

  scaler.device_scale();  // the loss is scaled outside of the scaler
  const auto enqueue = [&] {
    scaler.step(optimizer, {.max_norm = 1.0f});
    scaler.update();
  };
  const float eager = median_ms(30, enqueue);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  enqueue();
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  const float replay = median_ms(30, [&] { cudaGraphLaunch(exec, stream); });
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  const float measure = median_ms(30, [&] { hr::measure(grads); });
  const float apply = median_ms(30, [&] { optimizer.apply(0x1p-16f, false); });
  const auto size = static_cast<double>(hr::size_of(type));
  const double floor = total * moved_bytes(type, state) / copy_speed / 1e6;
  std::printf("%-12s %-4s %-5s %8.3f %8.3f %8.3f %6.2f   %8.3f (%3.0f %%) %8.3f\n", model.name,
              hr::to_string(type), hr::to_string(state), eager, replay, floor, replay / floor,
              measure, 100.0 * total * size / measure / 1e6 / copy_speed, apply);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "", only_state = argc > 2 ? argv[2] : "";
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  const hr::StreamScope scope(stream);
  double speed = 0.0;
  {
    const Tensor from(hr::DType::kF32, int64_t{1} << 30, 1.0f), to(hr::DType::kF32, 1 << 30, 1.0f);
    const float copy = median_ms(20, [&] {
      cudaMemcpyAsync(to.view().data, from.view().data, to.view().bytes(), cudaMemcpyDefault,
                      stream);
    });
    speed = 2.0 * static_cast<double>(to.view().bytes()) / copy / 1e6;
  }
  std::printf("copy %.0f GB/s; step (unscale, clip, AdamW) + update in ms:\n", speed);
  std::printf("%-12s %-4s %-5s %8s %8s %8s %6s   %16s %8s\n", "", "", "", "eager", "graph", "floor",
              "x", "measure alone", "apply");
  const Model models[] = {{"resnet50", resnet50()},
                          {"gpt2-124M", gpt2(12, 768)},
                          {"gpt2-xl", gpt2(48, 1600)},
                          {"lora-7b", lora()},
                          {"2000 x 100", std::vector<int64_t>(2000, 100)}};
  for (const Model& model : models) {
    if (!only.empty() && only != model.name) continue;
    for (const auto state :
         {hr::StateFormat::kFull, hr::StateFormat::kHalf, hr::StateFormat::kByte}) {
      if (!only_state.empty() && only_state != hr::to_string(state)) continue;
      for (const hr::DType type : {hr::DType::kF32, hr::DType::kF16, hr::DType::kBF16}) {
        run(model, type, state, speed);
      }
    }
  }
}
