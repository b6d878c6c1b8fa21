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
  Model(DType dtype, size_t count, size_t tensor_size, StateFormat state = StateFormat::kFull)
      : gradients(dtype, count), weights(dtype, count) {
    for (size_t first = 0; first < count; first += tensor_size) {
      const size_t size = std::min(tensor_size, count - first);
      parameters.push_back({"", weights.slice(first, size), gradients.slice(first, size)});
    }
    optimizer =
        std::make_unique<AdamW>(parameters, AdamWOptions{.lr = 1e-6}, Precision{.state = state});
  }

  Gradients gradients;
  Gradients weights;
  std::vector<Parameter> parameters;
  std::unique_ptr<AdamW> optimizer;
};

constexpr float kMultiplier = 0x1p-16f;

// Bytes of an element of each array that AdamW updates: the weight, what is below a 16-bit one, and
// two moments. A 16-bit weight with an FP32 master is only written.
struct UpdatedBytes {
  UpdatedBytes(DType dtype, StateFormat state) {
    const size_t each = state == StateFormat::kFull ? 4 : state == StateFormat::kHalf ? 2 : 1;
    const bool half = dtype != DType::kF32;
    weight = size_of(dtype);
    write_only = half && state == StateFormat::kFull;
    master = half ? each : 0;
    moment = each;
  }
  size_t weight, master, moment;
  bool write_only;
  size_t moved() const {
    return weight * (write_only ? 1 : 2) + 2 * master + 4 * moment + weight;  // and the gradient
  }
};

// The same memory as AdamW's, staggered like its arrays, so that they do not compete for the same
// cache sets (src/apply/arena.h).
class UpdateFloor {
 public:
  UpdateFloor(DType dtype, const UpdatedBytes& bytes, size_t count)
      : grads_(dtype, count), grad_bytes_(size_of(dtype)), count_(count) {
    constexpr size_t kStagger = 1088;
    const size_t sizes[] = {bytes.master, bytes.moment, bytes.moment, bytes.weight};
    size_t total = 0;
    for (const size_t size : sizes) total += size * count + kStagger;
    memory_ = FloatBuffer(total / sizeof(float));
    auto* next = reinterpret_cast<char*>(memory_.data());
    for (const size_t size : sizes) {
      if (size == 0) continue;
      arrays_.push_back({next, size});
      next += size * count + kStagger;
    }
    arrays_.back().write_only = bytes.write_only;
  }

  void run() const {
    update_floor(grads_.slice(0, count_).data, grad_bytes_, arrays_.data(), arrays_.size(), count_);
  }

 private:
  Gradients grads_;
  size_t grad_bytes_;
  size_t count_;
  FloatBuffer memory_;
  std::vector<FloorArray> arrays_;
};

void run_adamw(const Settings& settings, const Runner& runner, DType dtype, StateFormat state) {
  const bool full = state == StateFormat::kFull;
  const std::string name =
      std::string("adamw/") + to_string(dtype) + (full ? "" : std::string("/") + to_string(state));
  const std::string two_threads = name + "/threads=2", than_full = name + "/than=full";
  const bool others = full ? runner.is_selected(two_threads) : runner.is_selected(than_full);
  if (!runner.is_selected(name) && !others) return;
  const UpdatedBytes bytes(dtype, state);
  const size_t count = ((settings.megabytes << 20) / 28) / 1024 * 1024;
  Model model(dtype, count, count, state);
  const auto step = [&model](int threads) {
    set_num_threads(threads);
    model.optimizer->apply(kMultiplier, false);
  };
  const Work one_thread = [&] { step(1); };
  const size_t moved = count * bytes.moved();
  if (runner.is_selected(name)) {
    const UpdateFloor floor(dtype, bytes, count);
    runner.compare(name, moved, one_thread, "a loop that reads and writes the same",
                   [&] { floor.run(); });
  }
  if (full && runner.is_selected(two_threads)) {
    runner.compare(
        two_threads, moved, [&] { step(2); }, "one thread", one_thread);
  }
  if (!full && runner.is_selected(than_full)) {
    Model wide(dtype, count, count);
    runner.compare(than_full, moved, one_thread, "FP32 state, in the same time", [&] {
      set_num_threads(1);
      wide.optimizer->apply(kMultiplier, false);
    });
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
  for (const StateFormat state : {StateFormat::kFull, StateFormat::kHalf, StateFormat::kByte}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      run_adamw(settings, runner, dtype, state);
    }
  }
  run_many_tensors(runner);
  set_num_threads(0);
}

}  // namespace headroom::bench
