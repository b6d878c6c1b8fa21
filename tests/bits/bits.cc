// Prints what the library computes from fixed inputs, as bits: measurements, unscaling,
// conversions, and training with every optimizer. scripts/arm-test compares the output on several
// processors.
#include <headroom/headroom.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace headroom {
namespace {

// The same numbers everywhere: standard distributions differ between libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = state_ ^ (state_ >> 33);
    x *= 0xff51afd7ed558ccdu;
    return x ^ (x >> 29);
  }
  // In [-1, 1), with exponents that vary over 2^-12 to 1.
  float number() {
    const auto mantissa = static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23));
    return mantissa * 0x1p-23f / static_cast<float>(1u << (next() % 13));
  }

 private:
  uint64_t state_;
};

uint64_t hash_of(const void* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;
  const auto* const from = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ from[i]) * 1099511628211u;
  return hash;
}

void print(const std::string& name, const TensorView& view) {
  std::printf("%s %016llx\n", name.c_str(),
              static_cast<unsigned long long>(hash_of(view.data, view.bytes())));
}

void print(const std::string& name, const GradStats& stats) {
  std::printf("%s %lld %lld %lld %016llx %016llx %016llx %016llx %lld %lld\n", name.c_str(),
              static_cast<long long>(stats.count), static_cast<long long>(stats.inf_count),
              static_cast<long long>(stats.nan_count),
              static_cast<unsigned long long>(std::bit_cast<uint64_t>(stats.amax)),
              static_cast<unsigned long long>(std::bit_cast<uint64_t>(stats.squares[0])),
              static_cast<unsigned long long>(std::bit_cast<uint64_t>(stats.squares[1])),
              static_cast<unsigned long long>(std::bit_cast<uint64_t>(stats.squares[2])),
              static_cast<long long>(stats.new_inf), static_cast<long long>(stats.new_zeros));
}

// FP32 numbers, some of them inf and NaN if wanted.
std::vector<float> numbers(uint64_t seed, size_t count, float size, bool bad) {
  Random random(seed);
  std::vector<float> all(count);
  for (float& x : all) x = random.number() * size;
  if (bad) {
    all[count / 3] = std::bit_cast<float>(0x7f800000u);
    all[count / 2] = std::bit_cast<float>(0x7fc00000u);
  }
  return all;
}

template <typename T>
std::vector<T> converted(const std::vector<float>& from) {
  std::vector<T> to(from.size());
  convert(view(from), view(to));
  return to;
}

template <typename T>
void measurements(const std::string& type) {
  for (const size_t count : {1u, 31u, 1000u, 65537u}) {
    for (const float size : {1e-6f, 1.0f, 60000.0f}) {
      for (const bool bad : {false, true}) {
        std::vector<T> gradient = converted<T>(numbers(count, count, size, bad && count > 30));
        const std::string name = type + " " + std::to_string(count) + " " + std::to_string(size);
        print("convert " + name, view(gradient));
        print("measure " + name, measure({view(gradient)}));
        print("unscale " + name, unscale_({view(gradient)}, 1.0f / 3.0f));
        print("unscaled " + name, view(gradient));
      }
    }
  }
}

template <typename Optimizer, typename Options, typename T>
void training(const std::string& name, const Options& options, const Precision& precision) {
  constexpr size_t kCount = 4099;
  std::vector<T> weights = converted<T>(numbers(7, kCount, 1.0f, false));
  std::vector<T> gradients(kCount);
  Optimizer optimizer({{"w", view(weights), view(gradients)}}, options, precision);
  GradScaler scaler(parse_policy("headroom"));
  for (uint64_t step = 0; step < 30; ++step) {
    std::vector<float> wide = numbers(100 + step, kCount, 1e-3f, false);
    for (float& x : wide) x *= scaler.get_scale();
    if (step % 11 == 5) wide[17] = std::bit_cast<float>(0x7f800000u);
    convert(view(wide), view(gradients));
    scaler.scale(1.0f);
    scaler.step(optimizer, {.max_norm = 0.01f});
    scaler.update();
  }
  print("weights " + name, view(weights));
  for (const NamedTensor& tensor : optimizer.state().tensors) {
    print("state " + name + " " + tensor.name, tensor.tensor);
  }
  const std::string state = scaler.save();
  std::printf("scaler %s %016llx\n", name.c_str(),
              static_cast<unsigned long long>(hash_of(state.data(), state.size())));
}

template <typename T>
void trainings(const std::string& type, const Precision& precision) {
  training<SGD, SGDOptions, T>(type + " sgd", {.lr = 0.1}, precision);
  training<SGD, SGDOptions, T>(type + " momentum",
                               {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
                               precision);
  training<Adam, AdamOptions, T>(type + " adam", {.lr = 1e-3, .weight_decay = 0.01}, precision);
  training<AdamW, AdamWOptions, T>(type + " adamw", {.lr = 1e-3}, precision);
}

}  // namespace
}  // namespace headroom

int main() {
  using namespace headroom;
  measurements<f16>("f16");
  measurements<bf16>("bf16");
  measurements<float>("f32");
  trainings<f16>("f16", {});
  trainings<bf16>("bf16", {.stochastic_rounding = true, .seed = 3});
  trainings<bf16>("bf16 without masters", {.master_weights = false});
  trainings<float>("f32", {});
}
