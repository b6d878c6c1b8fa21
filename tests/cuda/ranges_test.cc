// RangeTable on a CUDA device against the CPU.
#include <headroom/ranges.h>

#include "measure/ranges.h"
#include "tests/cuda/support.h"

namespace headroom {
namespace {

void expect_same(const RangeStats& cuda, const RangeStats& cpu) {
  EXPECT_EQ(cuda.count, cpu.count);
  EXPECT_EQ(cuda.zeros, cpu.zeros);
  EXPECT_EQ(cuda.flushed, cpu.flushed);
  EXPECT_EQ(cuda.subnormal, cpu.subnormal);
  EXPECT_EQ(cuda.overflow, cpu.overflow);
  EXPECT_EQ(cuda.positive_inf, cpu.positive_inf);
  EXPECT_EQ(cuda.negative_inf, cpu.negative_inf);
  EXPECT_EQ(cuda.nan, cpu.nan);
  EXPECT_EQ(cuda.amax, cpu.amax);
}

// Random bits: every exponent, inf and NaN included.
std::vector<uint64_t> random_bits(size_t bytes) {
  std::vector<uint64_t> words(bytes / 8 + 1);
  std::mt19937_64 random(3);
  for (uint64_t& word : words) word = random();
  return words;
}

TEST_F(Cuda, RangesMatchTheCpuForEveryTypeSizeAndAlignment) {
  RangeTable cpu, cuda;
  cuda.prepare({DeviceType::kCUDA, 0});
  for (int round = 0; round < 2; ++round) {  // the second one finds the rows of the first cleared
    cpu.begin();
    cuda.begin();
    std::vector<std::unique_ptr<DeviceCopy>> copies;
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
      for (const int64_t count : {0, 1, 7, 8, 1023, 100003, 5000000}) {
        std::vector<uint64_t> bits = random_bits(static_cast<size_t>(count) * size_of(dtype));
        const TensorView host = view(static_cast<void*>(bits.data()), dtype, count);
        copies.push_back(std::make_unique<DeviceCopy>(host, static_cast<size_t>(count % 2)));
        cpu.measure(host);
        cuda.measure(copies.back()->view());
      }
    }
    cpu.finish();
    cuda.finish();
    const auto want = cpu.read(), got = cuda.read();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) expect_same(got[i], want[i]);
    EXPECT_TRUE(cuda.ready());
  }
}

TEST_F(Cuda, RangesOfFiniteTensorsMatchTheCpu) {
  std::vector<f16> halves(1 << 20);
  for (size_t i = 0; i < halves.size(); ++i)
    halves[i] = f16::from_bits(static_cast<uint16_t>(i % 0x7C00));
  const DeviceCopy copy(view(halves));
  RangeTable table;
  table.begin();
  table.measure(view(halves));
  table.measure(copy.view());
  table.finish();
  const auto rows = table.read();
  expect_same(rows[1], rows[0]);
  EXPECT_EQ(rows[1].amax, 65504.0);
}

// 300 tensors of each type take several kernels; their sizes differ by a factor of 10,000.
TEST_F(Cuda, RangesOfManyTensorsAtOnceMatchTheCpu) {
  std::vector<std::vector<uint64_t>> bits;
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  std::vector<TensorView> host, device;
  for (int64_t i = 0; i < 1200; ++i) {
    const auto dtype = static_cast<DType>(i % 4);
    const int64_t count = i % 100 == 7 ? 1000003 : i % 37 * 3;
    bits.push_back(random_bits(static_cast<size_t>(count) * size_of(dtype)));
    host.push_back(view(static_cast<void*>(bits.back().data()), dtype, count));
    copies.push_back(std::make_unique<DeviceCopy>(host.back(), static_cast<size_t>(count % 2)));
    device.push_back(copies.back()->view());
  }
  RangeTable cpu, cuda;
  cuda.prepare({DeviceType::kCUDA, 0});
  cpu.begin();
  cuda.begin();
  internal::RangesAccess::measure_all(cpu, host);
  EXPECT_EQ(internal::RangesAccess::measure_all(cuda, device).back(), 1199);
  cpu.finish();
  cuda.finish();
  const auto want = cpu.read(), got = cuda.read();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) expect_same(got[i], want[i]);
}

TEST_F(Cuda, RangesOfManyTensorsFillTheTableAndNoMore) {
  const std::vector<float> ones(8, 1.0f);
  const DeviceCopy copy(view(ones));
  RangeTable table(3);
  table.begin();
  const std::vector<TensorView> list(5, copy.view());
  EXPECT_EQ(internal::RangesAccess::measure_all(table, list),
            (std::vector<int64_t>{0, 1, 2, -1, -1}));
  table.finish();
  for (const RangeStats& stats : table.read()) EXPECT_EQ(stats.amax, 1.0);
}

}  // namespace
}  // namespace headroom
