// Whole scaled steps on a CUDA device, beside a copy of the same bytes.
#include <cuda_runtime.h>
#include <headroom/headroom.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace hr = headroom;

namespace {

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

float median_ms(int times, const std::function<void()>& work) {
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> all;
  for (int i = 0; i < times + 3; ++i) {
    cudaEventRecord(a);
    work();
    cudaEventRecord(b);
    cudaEventSynchronize(b);
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 3) all.push_back(ms);
  }
  std::nth_element(all.begin(), all.begin() + static_cast<long>(all.size() / 2), all.end());
  return all[all.size() / 2];
}

void* device_memory(size_t bytes) {
  void* data = nullptr;
  cudaMalloc(&data, bytes);
  cudaMemset(data, 0, bytes);
  return data;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  const size_t bytes = size_t{4} << 30;
  void* const from = device_memory(bytes);
  void* const to = device_memory(bytes);
  const float copy =
      median_ms(20, [&] { cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice); });
  const double speed = 2.0 * static_cast<double>(bytes) / copy / 1e6;
  std::printf("copy %.0f GB/s\n", speed);
  cudaFree(from);
  cudaFree(to);
  for (const auto& [name, sizes] :
       {std::make_pair("resnet50", resnet50()), std::make_pair("gpt2-124M", gpt2(12, 768)),
        std::make_pair("gpt2-xl", gpt2(48, 1600)),
        std::make_pair("2000 x 100", std::vector<int64_t>(2000, 100))}) {
    if (!only.empty() && only != name) continue;
    for (const hr::DType type : {hr::DType::kF32, hr::DType::kF16, hr::DType::kBF16}) {
      std::vector<hr::Parameter> parameters;
      std::vector<hr::TensorView> grads;
      std::vector<void*> memory;
      int64_t total = 0;
      for (const int64_t n : sizes) {
        hr::TensorView views[2];
        for (hr::TensorView& view : views) {
          memory.push_back(device_memory(static_cast<size_t>(n) * hr::size_of(type)));
          view = {memory.back(), type, n, {hr::DeviceType::kCUDA, 0}, false};
        }
        parameters.push_back({"", views[0], views[1]});
        grads.push_back(views[1]);
        total += n;
      }
      {
        hr::AdamW optimizer(parameters, {.lr = 1e-6});
        hr::GradScaler scaler;
        const float step = median_ms(30, [&] {
          scaler.scale(1.0f);
          scaler.step(optimizer, {.max_norm = 1.0f});
          scaler.update();
        });
        const float measure = median_ms(30, [&] { hr::measure(grads); });
        const float apply = median_ms(30, [&] { optimizer.apply(1.0f, false); });
        const double n = static_cast<double>(total);
        const double size = static_cast<double>(hr::size_of(type));
        const double per = 24 + 2 * size + (type == hr::DType::kF32 ? 0 : 2);
        std::printf(
            "%-12s %-5s step %8.3f ms  floor %8.3f  x%.3f | measure %7.3f (%.0f %% of copy)  apply "
            "%7.3f\n",
            name, hr::to_string(type), step, n * per / speed / 1e6, step / (n * per / speed / 1e6),
            measure, 100.0 * n * size / measure / 1e6 / speed, apply);
      }
      for (void* data : memory) cudaFree(data);
    }
  }
}
