// Faults of tensors and optimizer state.
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/reliability/faults.h"

namespace {

/// Weights of 1 with gradients of 1 and SGD with a learning rate of 0.1.
struct Weight {
  std::vector<float> w = std::vector<float>(4, 1.0f), g = std::vector<float>(4, 1.0f);
  hr::SGD optimizer{{{"w", hr::view(w), hr::view(g)}}, {.lr = 0.1}};

  // Expects that `grad` is refused and that the old gradient still works.
  Outcome refuse(const hr::TensorView& grad) {
    const Outcome outcome = expect_refusal([&] { optimizer.set_grad(0, grad); });
    optimizer.apply(1.0f, false);
    expect(w[3] == 0.9f, "the state is partly changed");
    return outcome;
  }
};

}  // namespace

Outcome inf_past_two_to_the_31() {
#if defined(__SANITIZE_THREAD__)
  constexpr int64_t kCount = 77;  // the thread sanitizer would need 16 GiB
#else
  constexpr int64_t kCount = (int64_t{1} << 31) + 77;
#endif
  // Only a few pages are written: the kernel maps the rest to one page of zeros.
  const size_t bytes = static_cast<size_t>(kCount) * sizeof(hr::bf16);
  void* const memory = mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  expect(memory != MAP_FAILED, "no address space");
  auto* const w = static_cast<hr::bf16*>(memory);
  hr::bf16* const g = w + kCount;
  g[kCount - 1] = hr::bf16(std::numeric_limits<float>::infinity());
  hr::SGD optimizer({{"w", hr::view(w, kCount), hr::view(g, kCount)}}, {.lr = 0.1},
                    {.master_weights = false});
  hr::GradScaler scaler;
  scaler.scale(1.0f);
  const hr::StepReport report = scaler.step(optimizer, {.clear_grads = hr::ClearGrads::kNever});
  const bool right = !report.applied && static_cast<float>(w[kCount - 1]) == 0.0f;
  munmap(memory, 2 * bytes);
  expect(right, "applied");
  return {"reported", report.to_string()};
}

Outcome gradient_of_another_size() {
  return Weight().refuse(hr::view(std::vector<float>(5).data(), 5));
}

Outcome gradient_moved() {
  Weight one;
  hr::GradScaler scaler;
  for (int step = 0; step < 2; ++step) {
    std::vector<float> grad(4, scaler.scale(1.0f));
    one.optimizer.set_grad(0, hr::view(grad));
    scaler.step(one.optimizer);
    scaler.update();
    one.optimizer.set_grad(0, {});
  }
  expect(std::fabs(one.w[0] - 0.8f) < 1e-6f, "a weight is " + std::to_string(one.w[0]));
  return {"fine", "`set_grad` passes the new address"};
}

Outcome gradient_cut_to_one_element() {
  Weight one;
  return one.refuse(hr::view(one.g.data(), 1));
}

Outcome gradient_without_memory() {
  return Weight().refuse(hr::view(static_cast<float*>(nullptr), 4));
}

Outcome gradient_of_another_type() {
  Weight one;
  std::vector<hr::f16> grad(4, hr::f16(1.0f));
  one.optimizer.set_grad(0, hr::view(grad));
  hr::GradScaler scaler(hr::StaticScale{2.0f});
  scaler.scale(1.0f);
  scaler.step(one.optimizer);
  expect(std::fabs(one.w[0] - 0.95f) < 1e-6f, "a weight is " + std::to_string(one.w[0]));
  return {"fine", "types may be mixed"};
}

Outcome gradient_on_another_device() {
  Weight one;
  const hr::TensorView there{one.g.data(), hr::DType::kF32, 4, {hr::DeviceType::kCUDA, 0}, false};
  const Outcome outcome = one.refuse(there);
  expect(outcome.what.find("'w'") != std::string::npos &&
             outcome.what.find("device") != std::string::npos,
         "the message names neither the parameter nor the device");
  // Not the message itself, which depends on the build.
  return {"reported", "refused, with the parameter's name"};
}

// One block of memory, because messages name the tensor with the lowest address first.
Outcome gradient_of_two_parameters() {
  std::vector<float> block(12);
  float* const a = block.data();
  return expect_refusal([&] {
    hr::SGD optimizer(
        {{"a", hr::view(a, 4), hr::view(a + 8, 4)}, {"b", hr::view(a + 4, 4), hr::view(a + 8, 4)}});
  });
}

Outcome same_parameter_listed_twice() {
  std::vector<float> block(8);
  const hr::Parameter p = {"w", hr::view(block.data(), 4), hr::view(block.data() + 4, 4)};
  return expect_refusal([&] { hr::SGD optimizer({p, p}); });
}

namespace {

/// Two weight tensors of ones and AdamW, after one step.
struct TwoWeights {
  std::vector<float> a, b, ga, gb;
  hr::AdamW optimizer;

  TwoWeights(size_t first, size_t second, const char* name, const char* other)
      : a(first, 1.0f),
        b(second, 1.0f),
        ga(first, 1.0f),
        gb(second, 100.0f),
        optimizer({{name, hr::view(a), hr::view(ga)}, {other, hr::view(b), hr::view(gb)}}) {
    optimizer.apply(1.0f, false);
  }
};

Outcome expect_state_refused(const TwoWeights& theirs, TwoWeights ours) {
  const TwoWeights before(ours.a.size(), ours.b.size(), "", "");
  const Outcome outcome =
      expect_refusal([&] { ours.optimizer.load_state(theirs.optimizer.state()); });
  expect(ours.a == before.a && ours.b == before.b, "the state is partly changed");
  ours.optimizer.apply(1.0f, false);
  expect(std::fabs(ours.a[0] - (before.a[0] - 1e-3f)) < 1e-4f, "the moments have changed");
  return outcome;
}

}  // namespace

Outcome optimizer_state_of_another_model() {
  return expect_state_refused(TwoWeights(1, 4, "a", "b"), TwoWeights(4, 1, "a", "b"));
}

Outcome optimizer_state_in_another_order() {
  return expect_state_refused(TwoWeights(4, 4, "a", "b"), TwoWeights(4, 4, "b", "a"));
}
