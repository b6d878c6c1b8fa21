// A scaler on a CUDA device through C: calls enqueue on the thread's stream, and reports are
// pending until the device has finished.
#include <cuda_runtime.h>
#include <headroom/headroom.h>

#include <limits>

#include "tests/c/support.h"

namespace headroom {
namespace {

constexpr int64_t kCount = 1000;

// FP32 managed memory, accessible from host and device.
class ManagedFloats {
 public:
  explicit ManagedFloats(int64_t count) : count_(count) {
    EXPECT_EQ(cudaMallocManaged(&data_, static_cast<size_t>(count) * sizeof(float)), cudaSuccess);
  }
  ~ManagedFloats() { cudaFree(data_); }
  ManagedFloats(const ManagedFloats&) = delete;
  ManagedFloats& operator=(const ManagedFloats&) = delete;
  void fill(float value) { std::fill(data_, data_ + count_, value); }
  float operator[](int64_t i) const { return data_[i]; }
  hr_tensor tensor() const { return {data_, count_, HR_F32, HR_CUDA, 0, 0}; }

 private:
  int64_t count_;
  float* data_ = nullptr;
};

TEST(Cuda, DeviceStepIsPendingUntilReported) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_OK(hr_set_stream(stream));
  ManagedFloats weight(kCount), grad(kCount), loss(1), scaled(1);
  weight.fill(1.0f);
  loss.fill(1.0f);
  const hr_parameter parameter = {"w", weight.tensor(), grad.tensor()};
  const hr_tensor from = loss.tensor(), to = scaled.tensor();
  hr_fused_options sgd;
  ASSERT_OK(hr_fused_options_init(&sgd, sizeof(sgd), HR_SGD));
  sgd.lr = 0.5;
  hr_scaler_options options;
  ASSERT_OK(hr_scaler_options_init(&options, sizeof(options)));
  options.device_type = HR_CUDA;
  hr_optimizer* optimizer = nullptr;
  hr_scaler* scaler = nullptr;
  ASSERT_OK(hr_fused_create(HR_SGD, &parameter, 1, &sgd, nullptr, &optimizer));
  ASSERT_OK(hr_scaler_create(nullptr, &options, &scaler));

  float number = 0.0f;
  EXPECT_EQ(hr_scaler_scale(scaler, 1.0f, &number), HR_ERROR_UNSUPPORTED);
  auto report = sized<hr_report>();
  for (const float value : {0.25f, std::numeric_limits<float>::infinity()}) {
    EXPECT_OK(hr_scaler_scale_tensor(scaler, &from, &to));
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    grad.fill(value * scaled[0]);
    EXPECT_OK(hr_scaler_step(scaler, optimizer, nullptr, &report));
    EXPECT_EQ(report.pending, 1);
    char line[128];
    EXPECT_OK(hr_report_text(&report, line, sizeof(line), nullptr));
    EXPECT_STREQ(line, "pending: not known yet; call report() or try_report()");
    EXPECT_OK(hr_scaler_update(scaler));
    EXPECT_OK(hr_scaler_report(scaler, optimizer, &report));
    EXPECT_EQ(report.pending, 0);
    EXPECT_EQ(report.scale, 65536.0f);
    EXPECT_EQ(report.applied, value == 0.25f);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(weight[kCount - 1], 0.875f);  // the second step is skipped
  }
  EXPECT_STREQ(report.culprit_text, "w: 1000 inf, 0 nan");
  EXPECT_OK(hr_scaler_get_scale(scaler, &number));
  EXPECT_EQ(number, 32768.0f);
  EXPECT_OK(hr_optimizer_destroy(optimizer));
  EXPECT_OK(hr_scaler_destroy(scaler));
  EXPECT_OK(hr_set_stream(nullptr));
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace headroom
