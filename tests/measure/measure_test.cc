// measure(): norms, counts, culprits and detail of lists of tensors.
#include <sys/mman.h>

#include "tests/float_mode.h"
#include "tests/support.h"

namespace headroom {
namespace {

// Tensors of every dtype, empty, small and large, with very large and very small values.
struct MixedTensors {
  std::vector<f16> a = random_values<f16>(70001, 1);
  std::vector<float> b = random_values<float>(130, 2, 1e20);
  std::vector<float> empty;
  std::vector<bf16> c = random_values<bf16>(9, 3, 1e-20);
  std::vector<bf16> d = random_values<bf16>(200000, 4);
  std::vector<double> e = random_values<double>(3000, 5, 1e200);
  std::vector<float> f = random_values<float>(66000, 6);
  std::vector<float> g = random_values<float>(31, 7);

  std::vector<TensorView> views() {
    return {view(a), view(b), view(empty), view(c), view(d), view(e), view(f), view(g)};
  }
};

TEST(Measure, ResultBitsDoNotDependOnSimdTargetOrThreadCount) {
  MixedTensors tensors;
  tensors.d[150000] = bf16(kNan);
  tensors.f[65999] = kInf;
  const std::string before = simd_target();
  std::string expected;
  for (const std::string& target : simd_targets()) {
    set_simd_target(target);
    for (const int threads : {1, 2, 3, 7}) {
      set_num_threads(threads);
      const std::string found = fingerprint(measure(tensors.views()));
      if (expected.empty()) expected = found;
      EXPECT_EQ(found, expected) << target << " " << threads;
    }
  }
  set_simd_target(before);
  set_num_threads(0);
}

TEST(Measure, NormOfMixedDtypesIsAccurate) {
  MixedTensors tensors;
  tensors.e = random_values<double>(3000, 5);
  long double squares = 0.0L;
  const auto add = [&](const auto& values) {
    for (const auto value : values) {
      squares += static_cast<long double>(to_double(value)) * to_double(value);
    }
  };
  add(tensors.a), add(tensors.b), add(tensors.c), add(tensors.d), add(tensors.e), add(tensors.f),
      add(tensors.g);
  const double norm = static_cast<double>(std::sqrt(squares));
  EXPECT_NEAR(measure(tensors.views()).norm() / norm, 1.0, 1e-6);
}

void expect_culprit(const GradStats& stats, int64_t tensor, int64_t inf, int64_t nan) {
  EXPECT_EQ(stats.culprit, tensor);
  EXPECT_EQ(stats.culprit_inf, inf);
  EXPECT_EQ(stats.culprit_nan, nan);
}

TEST(Measure, CulpritIsTheFirstNonFiniteTensorWithItsCounts) {
  MixedTensors tensors;
  tensors.d[3] = bf16(kInf);
  tensors.d[150000] = bf16(-kInf);
  tensors.d[199999] = bf16(kNan);
  tensors.f[0] = kNan;
  const GradStats stats = measure(tensors.views());
  expect_culprit(stats, 4, 2, 1);
  EXPECT_EQ(stats.inf_count, 2);
  EXPECT_EQ(stats.nan_count, 2);
}

TEST(Measure, FindsTheCulpritAmongThousandsOfSmallTensors) {
  std::vector<float> values = random_values<float>(10000 * 10, 8);
  std::vector<TensorView> views;
  for (size_t i = 0; i < 10000; ++i) views.push_back(view(values.data() + 10 * i, 10));
  values[56789] = kNan;
  values[56788] = kInf;
  values[99999] = kNan;
  const GradStats stats = measure(views);
  expect_culprit(stats, 5678, 1, 1);
  EXPECT_EQ(stats.nan_count, 2);
  EXPECT_EQ(stats.count, 100000);
}

TEST(Measure, DescribeCulpritNamesTheParameter) {
  std::vector<float> good = {1.0f}, bad = {kInf, 2.0f, -kInf, kInf};
  const std::vector<Parameter> parameters = {{"head", view(good), view(good)},
                                             {"embed.weight", view(bad), view(bad)}};
  EXPECT_EQ(describe_culprit(measure(parameters), parameters), "embed.weight: 3 inf, 0 nan");
  bad.assign(4, 1.0f);
  EXPECT_EQ(describe_culprit(measure(parameters), parameters), "");
}

TEST(Measure, EmptyListsAndTensorsHaveZeroNorm) {
  EXPECT_EQ(measure(std::vector<TensorView>{}).norm(), 0.0);
  const GradStats stats = measure({TensorView{}, TensorView{}});
  EXPECT_EQ(stats.count, 0);
  EXPECT_TRUE(stats.finite());
  EXPECT_EQ(stats.amax, 0.0);
}

// The elements are finite, so the tensor is, even where their squares or the norm leave FP32.
template <typename T>
void expect_norm_of_constant(double magnitude) {
  for (const size_t count : {1, 33, 1000, 5000}) {
    const std::vector<T> values(count, from_float<T>(magnitude));
    const double exact = to_double(values[0]);
    const double expected = exact * std::sqrt(static_cast<double>(count));
    const GradStats stats = measure({view(values)});
    EXPECT_TRUE(stats.finite());
    EXPECT_NEAR(stats.norm() / expected, 1.0, 1e-6) << magnitude << " " << count;
    EXPECT_EQ(stats.amax, exact);
  }
}

TEST(Measure, NormIsAccurateWhenSquaresOverflowOrUnderflow) {
  expect_norm_of_constant<float>(3e38);
  expect_norm_of_constant<float>(1e30);
  expect_norm_of_constant<float>(1e-44);
  expect_norm_of_constant<bf16>(1e38);
  expect_norm_of_constant<bf16>(1e-40);
  expect_norm_of_constant<f16>(65504.0);
  expect_norm_of_constant<f16>(6e-8);
  expect_norm_of_constant<double>(1e300);
  expect_norm_of_constant<double>(1e-300);
}

TEST(Measure, SumOfLargeDoubleSquaresDoesNotOverflow) {
  // Just below the magnitude from which squares are scaled before they are summed.
  const std::vector<double> values(1 << 20, 0x1.fp449);
  std::vector<TensorView> many(256, view(values));
  EXPECT_NEAR(measure(many).norm() / (0x1.fp449 * 0x1p14), 1.0, 1e-9);
}

TEST(Measure, NormIsAccurateForMixedMagnitudes) {
  const std::vector<double> large(2000, 1e200), small(2000, 1e-200);
  const std::vector<float> ordinary(2000, 1.0f);
  const GradStats stats = measure({view(small), view(ordinary), view(large), view(small)});
  EXPECT_NEAR(stats.norm() / (1e200 * std::sqrt(2000.0)), 1.0, 1e-12);
  EXPECT_NEAR(measure({view(small), view(ordinary)}).norm(), std::sqrt(2000.0), 1e-9);
}

TEST(Measure, IgnoresAndRestoresTheCallersFloatingPointMode) {
  const std::vector<bf16> subnormal(1000, bf16(1e-40f));
  const std::vector<float> tiny(1000, 1e-42f);
  const std::string expected = fingerprint(measure({view(subnormal), view(tiny)}));
  std::string found;
  uint64_t before = 0, after = 0;
  {
    const CarelessMode mode(FE_TOWARDZERO);
    before = float_mode();
    found = fingerprint(measure({view(subnormal), view(tiny)}));
    after = float_mode();
  }
  EXPECT_EQ(found, expected);
  EXPECT_NE(before, float_mode());
  EXPECT_EQ(after, before) << "the caller's mode is restored";
}

TEST(Measure, HandlesMoreThanTwoToThe31Elements) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer would need 16 GiB of shadow memory";
#endif
  constexpr int64_t kCount = (int64_t{1} << 31) + 77;
  const size_t bytes = static_cast<size_t>(kCount) * sizeof(f16);
  // Only the last page is written; the kernel backs all others with one page of zeros.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  f16* const values = static_cast<f16*>(memory);
  values[kCount - 1] = f16(3.0f);
  EXPECT_EQ(measure({view(values, kCount)}).norm(), 3.0);
  values[kCount - 2] = f16(kInf);
  const GradStats stats = measure({view(values, kCount)});
  EXPECT_EQ(stats.inf_count, 1);
  EXPECT_EQ(stats.count, kCount);
  munmap(memory, bytes);
}

template <typename T>
void expect_detail(double smallest_normal) {
  std::vector<T> values = random_values<T>(5000, 9);
  for (size_t i = 0; i < 700; ++i) values[i] = from_float<T>(0.0);
  for (size_t i = 700; i < 800; ++i) values[i] = from_float<T>(-smallest_normal / 4);
  values[4000] = from_float<T>(kInf);
  values[4001] = from_float<T>(kNan);
  GradDetail detail;
  const GradStats stats = measure({view(values)}, &detail);
  EXPECT_EQ(detail.zeros, 700);
  EXPECT_EQ(detail.subnormals, 100);
  std::array<int64_t, GradDetail::kBins> expected{};
  int64_t total = 0;
  for (const T value : values) {
    const double x = to_double(value);
    if (x == 0.0 || !std::isfinite(x)) continue;
    const int exponent =
        std::clamp(std::ilogb(x), GradDetail::kMinExponent, GradDetail::kMaxExponent);
    ++expected[static_cast<size_t>(exponent - GradDetail::kMinExponent)];
    ++total;
  }
  EXPECT_EQ(detail.histogram, expected);
  EXPECT_EQ(total + 700 + 2, 5000);
  EXPECT_EQ(fingerprint(stats), fingerprint(measure({view(values)})));
}

TEST(Measure, DetailCountsZerosSubnormalsAndExponents) {
  expect_detail<f16>(0x1p-14);
  expect_detail<bf16>(0x1p-126);
  expect_detail<float>(0x1p-126);
  expect_detail<double>(0x1p-1022);
}

TEST(Measure, RejectsInvalidViews) {
  std::vector<float> values = {1.0f};
  TensorView bad = view(values);
  bad.data = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "Gradient 1 has null data", [&] {
    measure({view(values), bad});
  });
  bad = view(values);
  bad.count = -1;
  expect_error(ErrorCode::kInvalidArgument, "negative count", [&] { measure({bad}); });
  bad.count = std::numeric_limits<int64_t>::max();
  expect_error(ErrorCode::kInvalidArgument, "more than any memory", [&] { measure({bad}); });
  bad = view(values);
  bad.dtype = static_cast<DType>(9);
  expect_error(ErrorCode::kInvalidArgument, "unknown element type", [&] { measure({bad}); });
  bad = view(values);
  bad.device.type = static_cast<DeviceType>(9);
  expect_error(ErrorCode::kInvalidArgument, "device of an unknown type", [&] { measure({bad}); });
  bad = view(values);
  bad.device = {DeviceType::kCUDA, 99};
  expect_error(ErrorCode::kUnsupported, "CUDA", [&] { measure({bad}); });
}

}  // namespace
}  // namespace headroom
