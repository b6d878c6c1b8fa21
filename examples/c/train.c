// Trains a network of two layers from scratch in plain C: FP16 weights and gradients, AdamW with
// FP32 masters, and a dynamic scale. It fits a field of a few millimetres in metres, so most
// gradients would underflow in FP16 without loss scaling.
//
//     cc -std=c11 train.c -lheadroom-c -lm -o train && ./train [steps]
#include <headroom/c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 32, BATCH = 64, WEIGHTS = HIDDEN * 2, TENSORS = 3 };

static const char* const names[TENSORS] = {"hidden.weight", "hidden.bias", "out.weight"};
static const int64_t counts[TENSORS] = {WEIGHTS, HIDDEN, HIDDEN};

// Weights and gradients in FP16, and FP32 copies for computing.
static uint16_t weight16[TENSORS][WEIGHTS], grad16[TENSORS][WEIGHTS];
static float weight[TENSORS][WEIGHTS], grad[TENSORS][WEIGHTS];

static void check(hr_status status) {
  if (status == HR_OK) return;
  fprintf(stderr, "%s: %s\n", hr_status_name(status), hr_last_error());
  exit(1);
}

// Converts between FP16 and FP32.
static void convert(void* from, int32_t from_type, void* to, int32_t to_type, int64_t count) {
  const hr_tensor source = hr_cpu_tensor(from, from_type, count);
  const hr_tensor target = hr_cpu_tensor(to, to_type, count);
  check(hr_convert(&source, &target));
}

// Uniform in [-1, 1); the same sequence on every machine.
static float uniform(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

// Forward and backward of one batch: returns the loss and adds the gradients of loss x scale.
static float run_batch(float scale) {
  float loss = 0.0f;
  for (int sample = 0; sample < BATCH; ++sample) {
    const float x[2] = {uniform(), uniform()};
    const float target = 2e-3f * sinf(2.0f * x[0]) * x[1];
    float hidden[HIDDEN], y = 0.0f;
    for (int i = 0; i < HIDDEN; ++i) {
      hidden[i] = tanhf(weight[0][2 * i] * x[0] + weight[0][2 * i + 1] * x[1] + weight[1][i]);
      y += weight[2][i] * hidden[i];
    }
    const float error = y - target;
    loss += error * error / BATCH;

    const float dy = scale * 2.0f * error / BATCH;
    for (int i = 0; i < HIDDEN; ++i) {
      const float dh = dy * weight[2][i] * (1.0f - hidden[i] * hidden[i]);
      grad[0][2 * i] += dh * x[0];
      grad[0][2 * i + 1] += dh * x[1];
      grad[1][i] += dh;
      grad[2][i] += dy * hidden[i];
    }
  }
  return loss;
}

int main(int argc, char** argv) {
  const int steps = argc > 1 ? atoi(argv[1]) : 600;
  if (steps <= 0) {
    fprintf(stderr, "usage: train [steps]\n");
    return 2;
  }
  check(hr_check_version(HEADROOM_VERSION_MAJOR, HEADROOM_VERSION_MINOR));

  hr_parameter parameters[TENSORS];
  for (int t = 0; t < TENSORS; ++t) {
    for (int64_t i = 0; i < counts[t]; ++i) weight[t][i] = (t == 2 ? 0.02f : 1.0f) * uniform();
    convert(weight[t], HR_F32, weight16[t], HR_F16, counts[t]);
    parameters[t].name = names[t];
    parameters[t].weight = hr_cpu_tensor(weight16[t], HR_F16, counts[t]);
    parameters[t].grad = hr_cpu_tensor(grad16[t], HR_F16, counts[t]);
  }
  hr_fused_options adamw;
  check(hr_fused_options_init(&adamw, sizeof adamw, HR_ADAMW));
  adamw.lr = 3e-3;
  adamw.weight_decay = 0.0;
  hr_optimizer* optimizer;
  check(hr_fused_create(HR_ADAMW, parameters, TENSORS, &adamw, NULL, &optimizer));

  hr_scaler* scaler;  // the initial scale is too high, so the first steps overflow and lower it
  check(hr_scaler_create("dynamic:init_scale=16777216,growth_interval=200", NULL, &scaler));

  hr_report report = {.size = sizeof report};
  for (int step = 0; step < steps; ++step) {
    for (int t = 0; t < TENSORS; ++t) {
      convert(weight16[t], HR_F16, weight[t], HR_F32, counts[t]);
      for (int64_t i = 0; i < counts[t]; ++i) grad[t][i] = 0.0f;
    }
    float scale;
    check(hr_scaler_scale(scaler, 1.0f, &scale));
    const float loss = run_batch(scale);
    for (int t = 0; t < TENSORS; ++t) convert(grad[t], HR_F32, grad16[t], HR_F16, counts[t]);
    check(hr_scaler_step(scaler, optimizer, NULL, &report));
    check(hr_scaler_update(scaler));

    char line[512];
    check(hr_report_text(&report, line, sizeof line, NULL));
    if (!report.applied || step % (steps / 6 > 0 ? steps / 6 : 1) == 0 || step == steps - 1) {
      printf("step %3d  loss %.3e  %s\n", step, (double)loss, line);
    }
  }
  printf("%lld of %lld steps skipped\n", (long long)report.skipped, (long long)report.steps);
  check(hr_scaler_destroy(scaler));
  check(hr_optimizer_destroy(optimizer));
  return 0;
}
