// A trainer in plain CUDA: FP16 weights and gradients, one fused kernel for loss and backward, a
// stream of its own. Nothing in a step waits for the host. Lines that are due to Headroom end with
// "// headroom".
//
// The model is logistic regression on small inputs: gradients around 1e-8, which are zero in FP16
// unless the loss is scaled. With --unscaled they all become zero and the loss stops falling.
#include <cuda_fp16.h>
#include <headroom/cuda.h>      // headroom
#include <headroom/headroom.h>  // headroom

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace hr = headroom;  // headroom

constexpr int kInputs = 256;
constexpr int kBatch = 4096;
constexpr float kSignal = 1e-4f;  // size of the inputs

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

// Loss and backward in one kernel: one block for each input j. The gradient of the loss is
// multiplied by the scale before anything is rounded to FP16.
__global__ void loss_and_backward(const float* inputs, const float* labels, const __half* weights,
                                  const float* scale,  // headroom
                                  __half* grads, float* loss) {
  __shared__ float sums[256];
  const int j = blockIdx.x;
  float grad = 0.0f;
  for (int i = threadIdx.x; i < kBatch; i += blockDim.x) {
    const float* const x = inputs + i * kInputs;
    float score = 0.0f;
    for (int k = 0; k < kInputs; ++k) score += x[k] * __half2float(weights[k]);
    const float margin = labels[i] * score;
    if (j == 0) atomicAdd(loss, log1pf(expf(-margin)) / kBatch);
    grad -= labels[i] * x[j] / (1.0f + expf(margin)) / kBatch;
  }
  sums[threadIdx.x] = grad;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) grads[j] = __float2half(sums[0] * *scale);  // headroom: * *scale
}

template <typename T>
T* on_device(size_t count) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, count * sizeof(T)));
  CHECK(cudaMemset(data, 0, count * sizeof(T)));
  return data;
}

int main(int argc, char** argv) {
  const bool scaled = argc < 2 || std::strcmp(argv[1], "--unscaled") != 0;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> inputs(kBatch * kInputs), labels(kBatch), truth(kInputs);
  for (float& w : truth) w = normal(random);
  for (int i = 0; i < kBatch; ++i) {
    float score = 0.0f;
    for (int j = 0; j < kInputs; ++j) {
      inputs[i * kInputs + j] = kSignal * normal(random);
      score += inputs[i * kInputs + j] * truth[j];
    }
    labels[i] = score > 0.0f ? 1.0f : -1.0f;
  }
  float* const x = on_device<float>(inputs.size());
  float* const y = on_device<float>(labels.size());
  __half* const weights = on_device<__half>(kInputs);
  __half* const grads = on_device<__half>(kInputs);
  float* const loss = on_device<float>(1);
  CHECK(cudaMemcpy(x, inputs.data(), inputs.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(y, labels.data(), labels.size() * 4, cudaMemcpyHostToDevice));
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceSynchronize());

  hr::SGD optimizer({{"weights", hr::device_view(weights, kInputs),         // headroom
                      hr::device_view(grads, kInputs)}},                    // headroom
                    {.lr = 2e8, .momentum = 0.9});                          // headroom
  const hr::ScalePolicy policy = hr::preset(scaled ? "headroom" : "none");  // headroom
  hr::GradScaler scaler(policy, {.device = {hr::DeviceType::kCUDA, 0}});    // headroom
  const float* const scale = scaler.device_scale();                         // headroom

  float last = 0.0f;
  constexpr int kSteps = 400;
  for (int step = 1; step <= kSteps; ++step) {
    CHECK(cudaMemsetAsync(loss, 0, sizeof(float), stream));
    loss_and_backward<<<kInputs, 256, 0, stream>>>(x, y, weights, scale, grads, loss);
    scaler.step(optimizer, {.max_norm = 1.0f, .stream = stream});  // headroom
    scaler.update(stream);                                         // headroom
    if (step % 100 != 0) continue;
    CHECK(cudaMemcpyAsync(&last, loss, sizeof(float), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    std::printf("step %3d  loss %.5f  %s\n", step, last,
                scaler.report().to_string().c_str());  // headroom
  }
  const hr::ScaleState state = scaler.state();  // headroom
  std::printf("%s: loss %.5f after %d steps, %lld skipped, scale %g\n",
              scaled ? "scaled" : "unscaled", last, kSteps, static_cast<long long>(state.skipped()),
              state.scale());
  return std::isfinite(last) ? 0 : 1;
}
