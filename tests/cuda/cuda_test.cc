// Conversion, measurement, unscaling and optimizers on a CUDA device against the CPU, bit for bit
// where docs promise it.
#include <cstdlib>

#include "core/cuda.h"
#include "tests/cuda/support.h"

namespace headroom {
namespace {

constexpr DType kAll[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
constexpr DType kGrads[] = {DType::kF16, DType::kBF16, DType::kF32};

void expect_same(const GradStats& cuda, const GradStats& cpu) {
  EXPECT_EQ(cuda.count, cpu.count);
  EXPECT_EQ(cuda.inf_count, cpu.inf_count);
  EXPECT_EQ(cuda.nan_count, cpu.nan_count);
  EXPECT_EQ(cuda.amax, cpu.amax);
  EXPECT_EQ(cuda.culprit, cpu.culprit);
  EXPECT_EQ(cuda.culprit_inf, cpu.culprit_inf);
  EXPECT_EQ(cuda.culprit_nan, cpu.culprit_nan);
  if (cpu.finite()) {
    EXPECT_NEAR(cuda.norm(), cpu.norm(), 1e-6 * cpu.norm());
  } else {
    EXPECT_EQ(std::isnan(cuda.norm()), std::isnan(cpu.norm()));
  }
}

// scripts/gpu-archs compiles for one old architecture and names it here.
TEST_F(Cuda, RunsTheCodeThatWasForced) {
  const char* const forced = std::getenv("HEADROOM_TEST_CODE");
  if (forced == nullptr) GTEST_SKIP() << "HEADROOM_TEST_CODE is not set";
  EXPECT_EQ(internal::cuda_code_version(0), std::atoi(forced));
}

TEST_F(Cuda, ConversionsMatchTheCpu) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (const DType narrow : {DType::kF16, DType::kBF16}) {
    const TensorView from = view(static_cast<void*>(patterns.data()), narrow, 65536);
    std::vector<float> wide(65536);
    convert(from, view(wide));
    const DeviceCopy device_from(from), device_wide(view(wide));
    const HostTensor cleared(DType::kF32, 65536, 1);
    const DeviceCopy result(cleared.view());
    convert(device_from.view(), result.view());
    const auto widened = result.bytes();
    for (size_t i = 0; i < 65536; ++i) {  // NaN stays NaN, its payload may differ
      float got;
      std::memcpy(&got, widened.data() + 4 * i, 4);
      EXPECT_TRUE(std::isnan(wide[i])
                      ? std::isnan(got)
                      : std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(wide[i]));
    }
    for (float& x : wide) x *= 1.0009765f;  // between two 16-bit values, so narrowing rounds
    const DeviceCopy between(view(wide));
    std::vector<uint16_t> back(65536);
    const TensorView to = view(static_cast<void*>(back.data()), narrow, 65536);
    convert(view(wide), to);
    const DeviceCopy device_to(to);
    cudaMemset(device_to.view().data, 0, to.bytes());
    convert(between.view(), device_to.view());
    // NaN payloads may differ; everything else is the same.
    const auto got = device_to.bytes();
    for (size_t i = 0; i < 65536; ++i) {
      uint16_t bits;
      std::memcpy(&bits, got.data() + 2 * i, 2);
      if (!std::isnan(wide[i])) {
        EXPECT_EQ(bits, back[i]) << wide[i];
      }
    }
  }
}

TEST_F(Cuda, MeasureMatchesTheCpu) {
  for (const DType dtype : kAll) {
    for (const int64_t count : {0, 1, 7, 8, 9, 255, 8191, 8192, 8193, 100000}) {
      for (const size_t offset : {0, 1, 3}) {
        HostTensor host(dtype, count, 5);
        expect_same(measure({DeviceCopy(host.view(), offset).view()}), measure({host.view()}));
        if (count == 0) continue;
        host.set(count / 2, kInf);
        host.set(count - 1, -kInf);
        expect_same(measure({DeviceCopy(host.view(), offset).view()}), measure({host.view()}));
        host.set(count / 3, kNan);
        expect_same(measure({DeviceCopy(host.view(), offset).view()}), measure({host.view()}));
      }
    }
  }
}

TEST_F(Cuda, MeasureOfManyMixedTensorsMatchesTheCpu) {
  std::vector<std::unique_ptr<HostTensor>> hosts;
  for (int i = 0; i < 300; ++i) {
    hosts.push_back(std::make_unique<HostTensor>(kAll[i % 4], (i * 37) % 20000, i));
  }
  const auto compare = [&] {
    std::vector<std::unique_ptr<DeviceCopy>> copies;
    std::vector<TensorView> cpu, cuda;
    for (const auto& host : hosts) {
      copies.push_back(std::make_unique<DeviceCopy>(host->view()));
      cpu.push_back(host->view());
      cuda.push_back(copies.back()->view());
    }
    expect_same(measure(cuda), measure(cpu));
    const GradStats repeated = measure(cuda);
    EXPECT_EQ(fingerprint(repeated), fingerprint(measure(cuda)))
        << "repeated measurements have the same bits";
    cuda[7] = cpu[7];  // host and device tensors in one call
    expect_same(measure(cuda), measure(cpu));
  };
  compare();
  for (const int bad : {250, 41, 42}) {
    hosts[bad]->set(3, kNan);
    hosts[bad]->set(5, kInf);
    compare();
  }
}

TEST_F(Cuda, MagnitudeCountsMatchTheCpu) {
  for (const DType dtype : kAll) {
    for (const int64_t count : {1, 300, 100003}) {
      HostTensor host(dtype, count, 3, 1e-6);
      for (int64_t i = 0; i < count; i += 7) host.set(i, 0.0);
      if (count > 1) host.set(1, kInf);
      if (count > 2) host.set(2, kNan);
      if (count > 3) host.set(3, 1e-320);
      const DeviceCopy device(host.view(), 1);
      GradDetail cuda, cpu;
      expect_same(measure({device.view()}, &cuda), measure({host.view()}, &cpu));
      EXPECT_EQ(cuda.zeros, cpu.zeros);
      EXPECT_EQ(cuda.subnormals, cpu.subnormals);
      EXPECT_EQ(cuda.histogram, cpu.histogram);
    }
  }
}

TEST_F(Cuda, NormsMatchTheCpuWhenSquaresOverflowOrUnderflow) {
  HostTensor large(DType::kF32, 1000, 1, 1e37), small(DType::kF32, 1000, 1, 1e-42);
  expect_same(measure({DeviceCopy(large.view()).view()}), measure({large.view()}));
  expect_same(measure({DeviceCopy(small.view()).view()}), measure({small.view()}));
  HostTensor huge(DType::kF64, 1000, 1, 1e300), tiny(DType::kF64, 1000, 1, 1e-300);
  expect_same(measure({DeviceCopy(huge.view()).view()}), measure({huge.view()}));
  expect_same(measure({DeviceCopy(tiny.view()).view()}), measure({tiny.view()}));
}

TEST_F(Cuda, UnscaleMatchesTheCpuBitwise) {
  for (const DType dtype : kAll) {
    for (const float inverse : {0x1p-16f, 0x1p-30f, 0x1p30f, 0.3f}) {
      HostTensor host(dtype, 20001, 9, 100.0);
      host.set(17, kInf);
      host.set(9000, kNan);
      const DeviceCopy device(host.view(), 1);
      const GradStats cuda = unscale_({device.view()}, inverse);
      const GradStats cpu = unscale_({host.view()}, inverse);
      expect_same(cuda, cpu);
      EXPECT_EQ(cuda.new_inf, cpu.new_inf);
      EXPECT_EQ(cuda.new_zeros, cpu.new_zeros);
      host.set(9000, 0.0);  // NaN payloads may differ
      auto got = device.bytes();
      std::memset(got.data() + 9000 * size_of(dtype), 0, size_of(dtype));
      EXPECT_EQ(got, bytes_at(host.view()));
    }
  }
}

// The same optimizer and parameters on the CPU and on the device.
template <typename Optimizer, typename Options>
struct OptimizerPair {
  OptimizerPair(DType weight, DType grad, const Options& options, const Precision& precision,
                size_t offset) {
    for (const int64_t count : {1, 70, 8192, 20003}) {
      hosts.push_back(std::make_unique<HostTensor>(weight, count, static_cast<unsigned>(count)));
      hosts.push_back(std::make_unique<HostTensor>(grad, count, 7, 1000.0));
    }
    std::vector<Parameter> host_parameters, device_parameters;
    for (size_t i = 0; i < hosts.size(); i += 2) {
      for (const size_t j : {i, i + 1}) {
        devices.push_back(std::make_unique<DeviceCopy>(hosts[j]->view(), offset));
      }
      const std::string name = std::to_string(i / 2);
      host_parameters.push_back({name, hosts[i]->view(), hosts[i + 1]->view()});
      device_parameters.push_back({name, devices[i]->view(), devices[i + 1]->view()});
    }
    cpu = std::make_unique<Optimizer>(host_parameters, options, precision);
    cuda = std::make_unique<Optimizer>(device_parameters, options, precision);
  }

  void expect_same_bits() {
    for (size_t i = 0; i < hosts.size(); ++i) {
      EXPECT_EQ(devices[i]->bytes(), bytes_at(hosts[i]->view())) << i;
    }
    const OptimizerState a = cpu->state();
    const OptimizerState b = cuda->state();
    EXPECT_EQ(a.steps, b.steps);
    ASSERT_EQ(a.tensors.size(), b.tensors.size());
    for (size_t i = 0; i < a.tensors.size(); ++i) {
      std::vector<unsigned char> copy(a.tensors[i].tensor.bytes());
      cudaMemcpy(copy.data(), b.tensors[i].tensor.data, copy.size(), cudaMemcpyDefault);
      EXPECT_EQ(copy, bytes_at(a.tensors[i].tensor)) << a.tensors[i].name;
    }
  }

  std::vector<std::unique_ptr<HostTensor>> hosts;
  std::vector<std::unique_ptr<DeviceCopy>> devices;
  std::unique_ptr<Optimizer> cpu, cuda;
};

template <typename Optimizer, typename Options>
void expect_same_bits_after_training(const Options& options) {
  for (const DType grad : kGrads) {
    for (const DType weight : kGrads) {
      for (const Precision& precision : {Precision{}, Precision{.master_weights = false},
                                         Precision{.stochastic_rounding = true, .seed = 3},
                                         Precision{.seed = 4, .state = StateFormat::kHalf},
                                         Precision{.seed = 5, .state = StateFormat::kByte}}) {
        for (const size_t offset : {0, 1}) {
          OptimizerPair<Optimizer, Options> pair(weight, grad, options, precision, offset);
          for (int step = 0; step < 3; ++step) {
            pair.cpu->apply(0x1p-10f, step == 2);
            pair.cuda->apply(0x1p-10f, step == 2);
          }
          pair.expect_same_bits();
        }
      }
    }
  }
}

TEST_F(Cuda, SgdMatchesTheCpuBitwise) {
  expect_same_bits_after_training<SGD>(SGDOptions{.lr = 0.01, .weight_decay = 0.1});
  expect_same_bits_after_training<SGD>(
      SGDOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
}

TEST_F(Cuda, AdamMatchesTheCpuBitwise) {
  expect_same_bits_after_training<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1});
  expect_same_bits_after_training<AdamW>(AdamWOptions{.lr = 0.01});
}

TEST_F(Cuda, LionMatchesTheCpuBitwise) {
  expect_same_bits_after_training<Lion>(LionOptions{.lr = 0.01, .weight_decay = 0.1});
}

TEST_F(Cuda, OptimizerStateCopiesBetweenHostAndDevice) {
  const Precision random{.stochastic_rounding = true, .seed = 3};
  for (const Precision& precision : {Precision{}, random, Precision{.state = StateFormat::kHalf},
                                     Precision{.state = StateFormat::kByte}}) {
    using P = OptimizerPair<AdamW, AdamWOptions>;
    P one(DType::kBF16, DType::kBF16, {.lr = 0.01}, precision, 0);
    for (int step = 0; step < 3; ++step) one.cuda->apply(0x1p-10f, false);
    P two(DType::kBF16, DType::kBF16, {.lr = 0.5}, precision, 0);
    two.cpu->load_state(one.cuda->state());
    two.cuda->load_state(two.cpu->state());
    two.expect_same_bits();
  }
}

TEST_F(Cuda, FollowWeightUpdatesMastersOfModifiedWeights) {
  for (const DType weight : {DType::kF16, DType::kBF16}) {
    for (const Precision& precision :
         {Precision{}, Precision{.stochastic_rounding = true, .seed = 3}}) {
      OptimizerPair<SGD, SGDOptions> pair(weight, weight, {.lr = 1e-4}, precision, 1);
      pair.cpu->apply(0x1p-10f, false);
      pair.cuda->apply(0x1p-10f, false);
      for (const int64_t i : {0, 69}) {
        pair.hosts[2]->set(i, 42.0);
        cudaMemcpy(pair.devices[2]->view().data, pair.hosts[2]->view().data,
                   pair.hosts[2]->view().bytes(), cudaMemcpyDefault);
      }
      for (size_t i = 0; i < 4; ++i) {
        pair.cpu->follow_weight(i);
        pair.cuda->follow_weight(i);
      }
      pair.expect_same_bits();
      EXPECT_EQ(pair.cpu->master(1)[69], 42.0f);
    }
  }
}

// The device notices the change by itself; on the CPU the masters follow by follow_weight().
TEST_F(Cuda, StepsKeepWrittenWeightsWithTheBitsOfTheCpu) {
  for (const DType weight : {DType::kF16, DType::kBF16}) {
    for (const Precision& precision :
         {Precision{}, Precision{.stochastic_rounding = true, .seed = 3}}) {
      OptimizerPair<AdamW, AdamWOptions> pair(weight, weight, {.lr = 1e-4}, precision, 1);
      for (int64_t step = 0; step < 12; ++step) {
        for (size_t i = 0; i < pair.hosts.size(); i += 2) {
          HostTensor& host = *pair.hosts[i];
          const int64_t count = host.view().count;
          const int64_t first = count > 4096 ? 300 * step : 0;
          const int64_t end = count > 4096 ? first + 4096 : first + 1;
          for (int64_t e = first; e < end; ++e) host.set(e, 7.0 + static_cast<double>(step));
          host.set(count - 1, -3.0);  // kept as well, since a change of this tensor is noticed
          pair.devices[i]->write(host.view());
          pair.cpu->follow_weight(i / 2);
        }
        pair.cpu->apply(0x1p-10f, false);
        pair.cuda->apply(0x1p-10f, false);
        pair.expect_same_bits();
      }
    }
  }
}

// An allocator that counts, as a framework's would.
TEST_F(Cuda, MastersAndMomentsUseTheUsersAllocator) {
  int blocks = 0, alive = 0;
  {
    OptimizerPair<AdamW, AdamWOptions> pair(DType::kF16, DType::kF16, {.lr = 1e-4}, {}, 0);
    AdamW optimizer({}, {.lr = 1e-4});
    optimizer.set_allocator([&](size_t bytes, const Device& device) -> std::shared_ptr<void> {
      EXPECT_EQ(device.type, DeviceType::kCUDA);
      void* memory = nullptr;
      EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
      EXPECT_EQ(cudaMemset(memory, 0x5A, bytes), cudaSuccess);
      ++blocks, ++alive;
      return {memory, [&alive](void* data) {
                cudaFree(data);
                --alive;
              }};
    });
    optimizer.add_group(pair.cuda->parameters(), {.lr = 1e-4});
    EXPECT_EQ(blocks, 0);
    for (int step = 0; step < 3; ++step) {
      optimizer.apply(0x1p-10f, false);
      pair.cpu->apply(0x1p-10f, false);
    }
    EXPECT_EQ(blocks, 1);
    for (size_t i = 0; i < pair.hosts.size(); i += 2) {
      EXPECT_EQ(pair.devices[i]->bytes(), bytes_at(pair.hosts[i]->view())) << i;
    }
  }
  EXPECT_EQ(alive, 0);
}

TEST_F(Cuda, RebindToAnotherDeviceIsRejected) {
  std::vector<f16> weight(8, f16(1.0f)), grad(8);
  const DeviceCopy device_weight(view(weight)), device_grad(view(grad));
  AdamW optimizer({{"w", view(weight), view(grad)}});
  expect_error(ErrorCode::kMismatch, "another device", [&] {
    optimizer.rebind({{"w", device_weight.view(), device_grad.view()}});
  });
  EXPECT_EQ(optimizer.parameters()[0].weight.data, weight.data());
}

TEST_F(Cuda, HostScalerWithDeviceGradientsMatchesTheCpu) {
  using P = OptimizerPair<AdamW, AdamWOptions>;
  P pair(DType::kF16, DType::kF16, {.lr = 0.01}, {}, 0);
  GradScaler cpu(DynamicScale{.growth_interval = 3}), cuda(DynamicScale{.growth_interval = 3});
  for (int step = 0; step < 12; ++step) {
    const bool bad = step == 0 || step == 5;
    pair.hosts[3]->set(11, bad ? kInf : 1.0);
    cudaMemcpy(pair.devices[3]->view().data, pair.hosts[3]->view().data,
               pair.hosts[3]->view().bytes(), cudaMemcpyDefault);
    cpu.scale(1.0f);
    cuda.scale(1.0f);
    const StepReport a = cpu.step(*pair.cpu, {.clear_grads = ClearGrads::kNever});
    const StepReport b = cuda.step(*pair.cuda, {.clear_grads = ClearGrads::kNever});
    EXPECT_EQ(a.applied, b.applied);
    EXPECT_EQ(a.applied, !bad);
    EXPECT_EQ(a.culprit, b.culprit);
    cpu.update();
    cuda.update();
    EXPECT_EQ(cpu.save(), cuda.save());
  }
  pair.expect_same_bits();
  pair.hosts[1]->set(0, kNan);
  cudaMemcpy(pair.devices[1]->view().data, pair.hosts[1]->view().data,
             pair.hosts[1]->view().bytes(), cudaMemcpyDefault);
  cuda.scale(1.0f);
  EXPECT_FALSE(cuda.step(*pair.cuda).applied);
  for (size_t i = 1; i < pair.devices.size(); i += 2) {
    const auto bytes = pair.devices[i]->bytes();
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0), static_cast<long>(bytes.size()));
  }
}

TEST_F(Cuda, MeasuresMoreThanTwoToThe31Elements) {
  const int64_t count = (int64_t{1} << 31) + 12345;
  char* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, static_cast<size_t>(count) * 2), cudaSuccess);
  cudaMemset(memory, 0, static_cast<size_t>(count) * 2);
  const uint16_t values[2] = {0x3C00, 0x7C00};  // 1 and inf
  cudaMemcpy(memory + (count - 2) * 2, values, 4, cudaMemcpyDefault);
  const TensorView big{memory, DType::kF16, count, {DeviceType::kCUDA, 0}, false};
  const GradStats stats = measure({big});
  EXPECT_EQ(stats.inf_count, 1);
  EXPECT_EQ(stats.amax, 1.0);
  cudaFree(memory);
}

TEST(NoCudaDevice, CudaTensorsAreRejected) {
  if (cuda_available()) GTEST_SKIP() << "this machine has a CUDA device";
  const TensorView view{reinterpret_cast<void*>(64), DType::kF32, 8, {DeviceType::kCUDA, 0}, false};
  expect_error(ErrorCode::kUnsupported, "CUDA error", [&] { measure({view}); });
}

}  // namespace
}  // namespace headroom
