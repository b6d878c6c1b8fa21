// Fits a displacement field in metres (with values of millimetres) with a small network, in FP32,
// FP16 or BF16, with or without loss scaling. Everything but the scaler and the optimizer is plain
// loops: it shows how to use Headroom in your own training loop.
//
//     field [fp32|fp16|bf16] [none|dynamic|static:S|PRESET] [--steps N] [--seed N] [--trace FILE]
//
// The mean squared error over 256 points of millimetre size has gradients around 1e-9, below the
// smallest FP16 number, so FP16 without scaling stops learning early. (Fitting in millimetres
// instead of metres would also help.)
#include <headroom/headroom.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace hr = headroom;

constexpr size_t kPoints = 256;
constexpr size_t kInputs = 34;
constexpr size_t kHidden = 64;

using Floats = std::vector<float>;

// c[m x n] = a[m x k] b[k x n]. Strides allow a and b to be read transposed. Accumulates in FP32,
// as a Tensor Core does.
void matmul(size_t m, size_t n, size_t k, const float* a, size_t a_row, size_t a_col,
            const float* b, size_t b_row, size_t b_col, Floats& c) {
  c.assign(m * n, 0.0f);
  for (size_t i = 0; i < m; ++i) {
    for (size_t p = 0; p < k; ++p) {
      const float x = a[i * a_row + p * a_col];
      for (size_t j = 0; j < n; ++j) c[i * n + j] += x * b[p * b_row + j * b_col];
    }
  }
}

// Rounds values to the type T.
template <typename T>
void round_to(Floats& values) {
  for (float& value : values) value = static_cast<float>(T(value));
}

// One dense layer: weights, activations and all gradients are stored in T.
template <typename T>
struct Layer {
  size_t in, out;
  bool tanh;
  std::vector<T> weight, bias, weight_grad, bias_grad;
  Floats w, x, y;  // weights, input and output of this pass, rounded to T

  Layer(size_t inputs, size_t outputs, bool with_tanh, float gain, std::mt19937& random)
      : in(inputs),
        out(outputs),
        tanh(with_tanh),
        weight(in * out),
        bias(out),
        weight_grad(in * out),
        bias_grad(out),
        w(in * out) {
    std::normal_distribution<float> normal(0.0f, gain / std::sqrt(static_cast<float>(in)));
    for (T& value : weight) value = T(normal(random));
    for (T& value : bias) value = T(0.0f);
  }

  const Floats& forward(const Floats& input) {
    x = input;
    for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(weight[i]);
    matmul(kPoints, out, in, x.data(), in, 1, w.data(), out, 1, y);
    for (size_t i = 0; i < y.size(); ++i) {
      y[i] += static_cast<float>(bias[i % out]);
      if (tanh) y[i] = std::tanh(y[i]);
    }
    round_to<T>(y);
    return y;
  }

  // Takes the gradient of the output, stores those of the parameters, returns that of the input.
  Floats backward(Floats dy) {
    if (tanh) {
      for (size_t i = 0; i < dy.size(); ++i) dy[i] *= 1.0f - y[i] * y[i];
      round_to<T>(dy);
    }
    Floats dw, dx, db(out);
    matmul(in, out, kPoints, x.data(), 1, in, dy.data(), out, 1, dw);
    for (size_t i = 0; i < dy.size(); ++i) db[i % out] += dy[i];
    for (size_t i = 0; i < dw.size(); ++i) weight_grad[i] = T(dw[i]);
    for (size_t i = 0; i < db.size(); ++i) bias_grad[i] = T(db[i]);
    matmul(kPoints, in, out, dy.data(), out, 1, w.data(), 1, out, dx);
    round_to<T>(dx);
    return dx;
  }

  void add_parameters(const std::string& name, std::vector<hr::Parameter>& parameters) {
    parameters.push_back({name + ".weight", hr::view(weight), hr::view(weight_grad)});
    parameters.push_back({name + ".bias", hr::view(bias), hr::view(bias_grad)});
  }
};

struct Options {
  std::string precision = "fp16";
  hr::ScalePolicy policy;
  int steps = 1500;
  unsigned seed = 1;
  std::string trace;
};

// Random points of [-1, 1]^2 with sines and cosines of them as inputs, and the field in metres.
void make_data(unsigned seed, Floats& inputs, Floats& targets) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (size_t i = 0; i < kPoints; ++i) {
    const float x = uniform(random), y = uniform(random);
    inputs.push_back(x);
    inputs.push_back(y);
    for (int k = 1; k <= 8; ++k) {
      const float f = 1.5707963f * static_cast<float>(k);
      for (const float v : {std::sin(f * x), std::cos(f * x), std::sin(f * y), std::cos(f * y)}) {
        inputs.push_back(v);
      }
    }
    targets.push_back(1e-3f *
                      (std::sin(3.1f * x) * std::cos(2.2f * y) + 0.5f * std::sin(4.0f * x * y)));
  }
}

template <typename T>
int train(const Options& options) {
  Floats inputs, targets;
  make_data(options.seed, inputs, targets);
  std::mt19937 random(options.seed + 100);
  Layer<T> first(kInputs, kHidden, true, 1.0f, random),
      second(kHidden, kHidden, true, 1.0f, random), last(kHidden, 1, false, 0.01f, random);
  std::vector<hr::Parameter> parameters;
  first.add_parameters("first", parameters);
  second.add_parameters("second", parameters);
  last.add_parameters("last", parameters);

  hr::Adam optimizer(parameters, {.lr = 3e-3});
  hr::GradScaler scaler(options.policy);
  std::ofstream trace(options.trace);
  double variance = 0.0, error = 0.0;
  for (const float target : targets) variance += target * target / kPoints;

  for (int step = 0; step < options.steps; ++step) {
    optimizer.set_lr(3e-3 * 0.5 * (1.0 + std::cos(3.14159265 * step / options.steps)));
    const Floats& output = last.forward(second.forward(first.forward(inputs)));

    // The gradient of the mean squared error times the scale, rounded to T like all gradients.
    const float scaled = scaler.scale(1.0f);
    Floats dy(kPoints);
    error = 0.0;
    for (size_t i = 0; i < kPoints; ++i) {
      const float difference = output[i] - targets[i];
      error += difference * difference / kPoints;
      dy[i] = scaled * 2.0f * difference / static_cast<float>(kPoints);
    }
    round_to<T>(dy);
    first.backward(second.backward(last.backward(dy)));

    const hr::StepReport report = scaler.step(optimizer, {.max_norm = 1.0f});
    if (trace) {
      trace << "{\"step\":" << step + 1 << ",\"overflow\":" << (report.applied ? "false" : "true")
            << ",\"scale\":" << report.scale << ",\"loss\":" << error << "}\n";
    }
    scaler.update();
  }
  std::printf("%s R2 %.4f  skipped %lld  final scale %g\n", options.precision.c_str(),
              1.0 - error / variance, static_cast<long long>(scaler.state().skipped()),
              static_cast<double>(scaler.get_scale()));
  return 0;
}

int main(int argc, char** argv) try {
  Options options;
  int position = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool named = argument.rfind("--", 0) == 0 && i + 1 < argc;
    if (argument == "--steps" && named)
      options.steps = std::atoi(argv[++i]);
    else if (argument == "--seed" && named)
      options.seed = static_cast<unsigned>(std::atoi(argv[++i]));
    else if (argument == "--trace" && named)
      options.trace = argv[++i];
    else if (argument == "--growth-interval" && named)
      options.policy.set("growth_interval", std::atoi(argv[++i]));
    else if (position++ == 0)
      options.precision = argument;
    else
      options.policy = hr::parse_policy(argument);
  }
  if (options.precision == "fp32") return train<float>(options);
  if (options.precision == "bf16") return train<hr::bf16>(options);
  if (options.precision == "fp16") return train<hr::f16>(options);
  std::fprintf(stderr, "field: precision '%s' is none of fp32, fp16, bf16.\n",
               options.precision.c_str());
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "field: %s\n", error.what());
  return 2;
}
