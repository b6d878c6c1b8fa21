// What can happen to tensors and to what optimizers remember of them.
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/reliability/faults.h"

namespace {

/// A weight of 1 with a gradient of 1, under SGD with a rate of 0.1.
struct Weight {
  std::vector<float> w = std::vector<float>(4, 1.0f), g = std::vector<float>(4, 1.0f);
  hr::SGD optimizer{{{"w", hr::view(w), hr::view(g)}}, {.lr = 0.1}};

  // The sentence of the error that this gradient has to be, after which the old one still works.
  Outcome refuses(const hr::TensorView& grad) {
    const Outcome outcome = refused([&] { optimizer.set_grad(0, grad); });
    optimizer.apply(1.0f, false);
    expect(w[3] == 0.9f, "half-changed");
    return outcome;
  }
};

}  // namespace

Outcome inf_behind_two_to_the_31() {
#if defined(__SANITIZE_THREAD__)
  constexpr int64_t kCount = 77;  // the thread sanitizer would need 16 GiB
#else
  constexpr int64_t kCount = (int64_t{1} << 31) + 77;
#endif
  // Never written but for a page or two: the kernel backs it with one page of zeros.
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
  return Weight().refuses(hr::view(std::vector<float>(5).data(), 5));
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
  return {"fine", "`set_grad` says where"};
}

Outcome gradient_cut_to_one_element() {
  Weight one;
  return one.refuses(hr::view(one.g.data(), 1));
}

Outcome gradient_without_memory() {
  return Weight().refuses(hr::view(static_cast<float*>(nullptr), 4));
}

Outcome gradient_of_another_type() {
  Weight one;
  std::vector<hr::f16> grad(4, hr::f16(1.0f));
  one.optimizer.set_grad(0, hr::view(grad));
  hr::GradScaler scaler(hr::StaticScale{2.0f});
  scaler.scale(1.0f);
  scaler.step(one.optimizer);
  expect(std::fabs(one.w[0] - 0.95f) < 1e-6f, "a weight is " + std::to_string(one.w[0]));
  return {"fine", "any mix of types is read as it is"};
}

Outcome gradient_on_another_device() {
  Weight one;
  const hr::TensorView there{one.g.data(), hr::DType::kF32, 4, {hr::DeviceType::kCUDA, 0}, false};
  const Outcome outcome = one.refuses(there);
  expect(outcome.what.find("'w'") != std::string::npos &&
             outcome.what.find("device") != std::string::npos,
         "the sentence does not say what is wrong");
  return {"reported", "refused, with the parameter's name"};  // what it says depends on the build
}

// One block, since the sentences name what they find first in memory.
Outcome gradient_of_two_parameters() {
  std::vector<float> block(12);
  float* const a = block.data();
  return refused([&] {
    hr::SGD optimizer(
        {{"a", hr::view(a, 4), hr::view(a + 8, 4)}, {"b", hr::view(a + 4, 4), hr::view(a + 8, 4)}});
  });
}

Outcome same_parameter_listed_twice() {
  std::vector<float> block(8);
  const hr::Parameter p = {"w", hr::view(block.data(), 4), hr::view(block.data() + 4, 4)};
  return refused([&] { hr::SGD optimizer({p, p}); });
}

namespace {

/// Two weights of 1 under AdamW, after a step.
struct Two {
  std::vector<float> a, b, ga, gb;
  hr::AdamW optimizer;

  Two(size_t first, size_t second, const char* name, const char* other)
      : a(first, 1.0f),
        b(second, 1.0f),
        ga(first, 1.0f),
        gb(second, 100.0f),
        optimizer({{name, hr::view(a), hr::view(ga)}, {other, hr::view(b), hr::view(gb)}}) {
    optimizer.apply(1.0f, false);
  }
};

Outcome state_refused(const Two& theirs, Two ours) {
  const Two before(ours.a.size(), ours.b.size(), "", "");
  const Outcome outcome = refused([&] { ours.optimizer.load_state(theirs.optimizer.state()); });
  expect(ours.a == before.a && ours.b == before.b, "half-changed");
  ours.optimizer.apply(1.0f, false);
  expect(std::fabs(ours.a[0] - (before.a[0] - 1e-3f)) < 1e-4f, "the moments are others");
  return outcome;
}

}  // namespace

Outcome optimizer_state_of_another_model() {
  return state_refused(Two(1, 4, "a", "b"), Two(4, 1, "a", "b"));
}

Outcome optimizer_state_in_another_order() {
  return state_refused(Two(4, 4, "a", "b"), Two(4, 4, "b", "a"));
}
