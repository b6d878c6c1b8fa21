#include "bench/bench.h"

#include <headroom/headroom.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "bench/floor.h"
#include "core/buffer.h"

namespace headroom::bench {
namespace {

using internal::FloatBuffer;
using Work = std::function<void()>;

volatile uint32_t sink;  // keeps the compiler from removing the floor's loop

double seconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

class Runner {
 public:
  Runner(const Settings& settings, const std::function<void(const Figure&)>& done)
      : settings_(settings), done_(done) {}

  bool is_selected(const std::string& name) const {
    return name.find(settings_.filter) != std::string::npos;
  }

  // Alternates between both, so that a machine that slows down affects them equally.
  void compare(const std::string& name, size_t bytes, const Work& ours, const std::string& floor,
               const Work& floor_work) const {
    std::vector<double> our_times, floor_times;
    ours();
    floor_work();
    for (int i = 0; i < settings_.repetitions; ++i) {
      our_times.push_back(seconds(ours));
      floor_times.push_back(seconds(floor_work));
    }
    const double gigabytes = static_cast<double>(bytes) / 1e9;
    done_({name, floor, gigabytes / median(our_times), gigabytes / median(floor_times)});
  }

 private:
  const Settings& settings_;
  const std::function<void(const Figure&)>& done_;
};

// `count` gradients of a type between 1 and 2: no zeros, subnormals, inf or NaN.
class Gradients {
 public:
  Gradients(DType dtype, size_t count) : dtype_(dtype), memory_(count * size_of(dtype) / 4 + 16) {
    for (size_t i = 0; i < count; ++i) set(i, 1.0f + static_cast<float>(i % 1021) * 0x1p-10f);
  }

  TensorView slice(size_t first, size_t count) const {
    return view(static_cast<void*>(at(first)), dtype_, static_cast<int64_t>(count));
  }

 private:
  char* at(size_t index) const {
    return reinterpret_cast<char*>(memory_.data()) + index * size_of(dtype_);
  }
  void set(size_t index, float value) {
    void* to = at(index);
    if (dtype_ == DType::kF16) *static_cast<f16*>(to) = f16(value);
    if (dtype_ == DType::kBF16) *static_cast<bf16*>(to) = bf16(value);
    if (dtype_ == DType::kF32) *static_cast<float*>(to) = value;
    if (dtype_ == DType::kF64) *static_cast<double*>(to) = value;
  }

  DType dtype_;
  FloatBuffer memory_;
};

void run_measure(const Settings& settings, const Runner& runner) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64}) {
    const std::string name = std::string("measure/") + to_string(dtype);
    const std::string two_threads = name + "/threads=2";
    if (!runner.is_selected(name) && !runner.is_selected(two_threads)) continue;
    const size_t bytes = (settings.megabytes << 20) / 2;
    const size_t count = bytes / size_of(dtype);
    const Gradients gradients(dtype, count);
    const std::vector<TensorView> list = {gradients.slice(0, count)};
    const Work one_thread = [&] {
      set_num_threads(1);
      measure(list);
    };
    if (runner.is_selected(name)) {
      runner.compare(name, bytes, one_thread, "a vectorised read",
                     [&] { sink = read_floor(list[0].data, bytes); });
    }
    if (runner.is_selected(two_threads)) {
      runner.compare(
          two_threads, bytes,
          [&] {
            set_num_threads(2);
            measure(list);
          },
          "one thread", one_thread);
    }
  }
}

// Weights, gradients and AdamW for one type, in tensors of `tensor_size` elements.
struct Model {
  Model(DType dtype, size_t count, size_t tensor_size)
      : gradients(dtype, count), weights(dtype, count) {
    for (size_t first = 0; first < count; first += tensor_size) {
      const size_t size = std::min(tensor_size, count - first);
      parameters.push_back({"", weights.slice(first, size), gradients.slice(first, size)});
    }
    optimizer = std::make_unique<AdamW>(parameters, AdamWOptions{.lr = 1e-6});
  }

  Gradients gradients;
  Gradients weights;
  std::vector<Parameter> parameters;
  std::unique_ptr<AdamW> optimizer;
};

constexpr float kMultiplier = 0x1p-16f;

void run_adamw(const Settings& settings, const Runner& runner) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const std::string name = std::string("adamw/") + to_string(dtype);
    const std::string two_threads = name + "/threads=2";
    if (!runner.is_selected(name) && !runner.is_selected(two_threads)) continue;
    const bool half = dtype != DType::kF32;
    const size_t count = ((settings.megabytes << 20) / 28) / 1024 * 1024;
    Model model(dtype, count, count);
    // The floor uses its own arrays in the layout of the optimizer's: staggered, so that they do
    // not compete for the same cache sets (src/apply/arena.h).
    constexpr size_t kStagger = 272;
    const FloatBuffer arrays(3 * (count + kStagger));
    const FloatBuffer weight16(half ? count / 2 : 0);
    const Gradients floor_gradients(dtype, count);
    const UpdateArrays floor = {floor_gradients.slice(0, count).data,
                                size_of(dtype),
                                arrays.data(),
                                arrays.data() + count + kStagger,
                                arrays.data() + 2 * (count + kStagger),
                                reinterpret_cast<uint16_t*>(weight16.data()),
                                count};
    const size_t bytes = count * (24 + size_of(dtype) + (half ? 2 : 0));
    const Work one_thread = [&] {
      set_num_threads(1);
      model.optimizer->apply(kMultiplier, false);
    };
    if (runner.is_selected(name)) {
      runner.compare(name, bytes, one_thread, "a loop that reads and writes the same",
                     [&] { update_floor(floor); });
    }
    if (runner.is_selected(two_threads)) {
      runner.compare(
          two_threads, bytes,
          [&] {
            set_num_threads(2);
            model.optimizer->apply(kMultiplier, false);
          },
          "one thread", one_thread);
    }
  }
}

// Compares many small tensors with one large tensor of the same total size.
void run_many_tensors(const Runner& runner) {
  constexpr size_t kTensors = 10000;
  constexpr size_t kSize = 100;
  constexpr size_t kCount = kTensors * kSize;
  constexpr int kTimes = 20;  // a single call is too short to time
  const auto repeat = [](const Work& work) {
    return [work] {
      for (int i = 0; i < kTimes; ++i) work();
    };
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const std::string type = to_string(dtype);
    const std::string measure_name = "measure/" + type + "/tensors=10000";
    const std::string adamw_name = "adamw/" + type + "/tensors=10000";
    if (!runner.is_selected(measure_name) && !runner.is_selected(adamw_name)) continue;
    Model many(dtype, kCount, kSize);
    Model one(dtype, kCount, kCount);
    set_num_threads(1);
    const auto grads = [](const Model& model) {
      std::vector<TensorView> list;
      for (const Parameter& parameter : model.parameters) list.push_back(parameter.grad);
      return list;
    };
    const std::vector<TensorView> many_grads = grads(many);
    const std::vector<TensorView> one_grad = grads(one);
    if (runner.is_selected(measure_name)) {
      runner.compare(measure_name, kTimes * kCount * size_of(dtype),
                     repeat([&] { measure(many_grads); }), "one tensor",
                     repeat([&] { measure(one_grad); }));
    }
    if (runner.is_selected(adamw_name)) {
      const size_t bytes = kCount * (24 + size_of(dtype) + (dtype == DType::kF32 ? 0 : 2));
      runner.compare(adamw_name, kTimes * bytes,
                     repeat([&] { many.optimizer->apply(kMultiplier, false); }), "one tensor",
                     repeat([&] { one.optimizer->apply(kMultiplier, false); }));
    }
  }
}

}  // namespace

void run(const Settings& settings, const std::function<void(const Figure&)>& done) {
  const Runner runner(settings, done);
  run_measure(settings, runner);
  run_adamw(settings, runner);
  run_many_tensors(runner);
  set_num_threads(0);
}

}  // namespace headroom::bench
