// A scaler whose scale lives on the device: the same course as on the CPU, bit for bit, and the
// host never waits.
#include <atomic>
#include <random>
#include <thread>

#include "tests/cuda/loop.h"

namespace headroom {
namespace {

class DeviceScaler : public Cuda {};

TEST_F(DeviceScaler, RunsTheCoursesOfAllPresets) {
  for (const PresetInfo& info : presets()) {
    ScalePolicy policy = preset(info.name);
    if (policy.if_dynamic() != nullptr) policy.set("growth_interval", 3);
    SCOPED_TRACE(info.name);
    expect_same_on_both(with(policy), [](Plain& loop) {
      for (unsigned step = 0; step < 30; ++step) {
        const bool bad = step == 0 || step == 1 || step == 7 || step == 20;
        loop.backward(step, 100.0, bad ? static_cast<int>(step % 4) : -1, step == 7 ? kNan : kInf);
        loop.step({.max_norm = step % 3 == 0 ? 0.001f : 0.0f,
                   .clear_grads = static_cast<ClearGrads>(step % 3)});
        loop.update();
      }
    });
  }
}

TEST_F(DeviceScaler, BatchesAreRetriedUntilTheyFitOrAreGivenUp) {
  expect_same_on_both(with(preset("headroom-retry")), [](Plain& loop) {
    for (unsigned step = 0; step < 8; ++step) {
      do {
        const bool bad = step == 5 || (step == 2 && loop.scaler.get_scale() > 1000.0f);
        loop.backward(step, 100.0, bad ? 1 : -1, kInf);
        loop.step();
        loop.update();
        loop.log += loop.scaler.retry() ? "retry\n" : "next\n";
      } while (loop.scaler.retry());
    }
    EXPECT_GT(loop.scaler.state().skipped(), 2);
    EXPECT_EQ(loop.optimizer->steps(0), 7);
  });
}

TEST_F(DeviceScaler, AFirstStepOverflowLeavesNoMomentum) {
  using Momentum = Loop<SGD, SGDOptions>;
  expect_same_on_both<Momentum>(
      [](bool cuda) {
        return std::make_unique<Momentum>(cuda, DynamicScale{},
                                          SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
      },
      [](Momentum& loop) {
        for (unsigned step = 0; step < 4; ++step) {
          loop.backward(step, 10.0, step == 0 ? 2 : -1, kNan);
          loop.step();
          loop.update();
        }
      });
}

TEST_F(DeviceScaler, FiniteGradientsWithASquareBeyondFp32AreNoOverflow) {
  expect_same_on_both(with(DynamicScale{}, true, DType::kF32), [](Plain& loop) {
    loop.backward(1, 1e30);
    loop.step({.max_norm = 1.0f});
    loop.update();
    EXPECT_EQ(loop.scaler.state().skipped(), 0);
  });
}

TEST_F(DeviceScaler, UnscalingThatOverflowsSkips) {
  expect_same_on_both(with(StaticScale{0x1p-100f}, true, DType::kF32), [](Plain& loop) {
    loop.backward(1, 1e30);
    loop.scaler.step(*loop.optimizer);
    const StepReport report = loop.scaler.report();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
    EXPECT_NE(report.culprit.find("beyond FP32"), std::string::npos);
    loop.update();
  });
}

TEST_F(DeviceScaler, UnscalesByHandAndLooksAgainInStep) {
  for (const bool late_nan : {false, true}) {
    for (const bool bad : {false, true}) {
      expect_same_on_both(with(DynamicScale{.growth_interval = 2}), [&](Plain& loop) {
        for (unsigned step = 0; step < 3; ++step) {
          loop.backward(step, 1000.0, bad && step == 1 ? 1 : -1, kInf);
          loop.scaler.unscale_(*loop.optimizer);
          if (late_nan && step == 2) {
            const uint16_t nan = 0x7E00;
            cudaMemcpy(loop.grad(0).data, &nan, 2, cudaMemcpyDefault);
          }
          loop.step({.max_norm = 0.5f});
          loop.update();
        }
      });
    }
  }
}

TEST_F(DeviceScaler, GradientsThatWaitOverAnUpdateFollowTheScale) {
  const auto make = with(DynamicScale{.growth_interval = 1});
  const auto cpu = make(false), cuda = make(true);
  for (Plain* loop : {cpu.get(), cuda.get()}) {
    loop->backward(1, 1.0);
    loop->step();
    loop->backward(2, 1.0);  // waits: its step comes after the update
    loop->update();
    loop->step();
    loop->update();
    expect_error(ErrorCode::kWrongOrder, "before any scale() in this round",
                 [&] { loop->step(); });  // nothing says what scale these gradients have
  }
  EXPECT_EQ(cuda->log, cpu->log);
  EXPECT_TRUE(cuda->bits() == cpu->bits());
}

TEST_F(DeviceScaler, TwoOptimizersOfWhichOneOverflows) {
  const auto run = [](bool cuda) {
    Plain a(cuda, DynamicScale{}), b(cuda, DynamicScale{});
    a.backward(1, 1.0, 2, kInf);
    b.backward(2, 1.0);
    a.scaler.step(*a.optimizer);
    a.scaler.step(*b.optimizer);
    a.scaler.update();
    EXPECT_FALSE(a.scaler.report(*a.optimizer).applied);
    EXPECT_TRUE(a.scaler.report(*b.optimizer).applied);
    EXPECT_TRUE(a.scaler.report().applied) << "the last one";
    EXPECT_EQ(a.scaler.get_scale(), 32768.0f);
    auto bits = a.bits();
    for (auto& part : b.bits()) bits.push_back(part);
    return bits;
  };
  EXPECT_TRUE(run(false) == run(true));
}

TEST_F(DeviceScaler, TwoOptimizersInAnyOrderOfCallsRunTheSameCourse) {
  const auto run = [](bool cuda, unsigned seed) {
    const ScalePolicy policy = DynamicScale{.growth_interval = 2};
    Plain a(cuda, policy), b(cuda, policy);
    GradScaler& scaler = a.scaler;
    std::mt19937 random(seed);
    for (unsigned call = 0; call < 40; ++call) {
      Plain& one = random() % 2 == 0 ? a : b;
      const unsigned what = random() % 8;
      const int bad = random() % 8 == 0 ? 1 : -1;
      try {
        if (what < 2) a.scale();
        if (what == 0) a.fill(call, 100.0, bad, kInf);
        if (what < 2) b.fill(call + 10, 100.0);
        if (what == 2) scaler.unscale_(*one.optimizer);
        if (what == 3 || what == 4) scaler.step(*one.optimizer);
        if (what == 5 || what == 6) a.update();
        if (what == 7) scaler.discard();
      } catch (const Error& error) {
        a.log += std::string(error.what()) + "\n";
      }
    }
    auto bits = a.bits();
    for (auto& part : b.bits()) bits.push_back(part);
    return std::make_pair(a.log, bits);
  };
  for (unsigned seed = 0; seed < 30; ++seed) {
    const auto cpu = run(false, seed), cuda = run(true, seed);
    EXPECT_EQ(cuda.first, cpu.first) << seed;
    EXPECT_TRUE(cuda.second == cpu.second) << seed;
  }
}

TEST_F(DeviceScaler, DisabledStillSkipsWhatIsNotFinite) {
  expect_same_on_both(with(DynamicScale{}, false), [](Plain& loop) {
    for (unsigned step = 0; step < 3; ++step) {
      loop.backward(step, 1.0, step == 1 ? 3 : -1, kNan);
      loop.step();
    }
  });
}

TEST_F(DeviceScaler, SomebodyElseMayKeepTheScale) {
  float* outside = nullptr;  // the scale, what was found, what is told
  ASSERT_EQ(cudaMallocManaged(&outside, 3 * sizeof(float)), cudaSuccess);
  expect_same_on_both(with(DynamicScale{}, false), [&](Plain& loop) {
    const auto step = [&](float scale, float found, int bad) {
      loop.backward(1, 1.0, bad, kNan);
      outside[0] = scale;
      outside[1] = found;
      loop.step({.max_norm = 1.0f},
                {.scale = outside, .found_inf = outside + 1, .skipped = outside + 2});
      cudaDeviceSynchronize();
      loop.log += "skipped " + std::to_string(outside[2]) + "\n";
    };
    step(1024.0f, 0.0f, -1);
    step(0.5f, 0.0f, 2);
    step(0.5f, 1.0f, -1);
    for (const float unusable : {0.0f, -1.0f, static_cast<float>(kInf), static_cast<float>(kNan)}) {
      step(unusable, 0.0f, -1);
    }
    step(3.0f, 0.0f, -1);
  });
  cudaFree(outside);
}

TEST_F(DeviceScaler, StateIsSetByHandAndGoesFromSideToSide) {
  const auto make = with(DynamicScale{.growth_interval = 2});
  const auto cpu = make(false), cuda = make(true);
  for (Plain* loop : {cpu.get(), cuda.get()}) {
    loop->scaler.set_scale(1024.0f);
    loop->backward(1, 1.0, 1, kInf);
    loop->step();
    loop->update();
    loop->scaler.set_policy(DynamicScale{.growth_interval = 1});
    loop->backward(2, 1.0);
    loop->step();
    loop->update();
  }
  EXPECT_EQ(cuda->log, cpu->log);
  const auto other = make(true);
  other->scaler.load(cpu->scaler.save());
  EXPECT_EQ(other->scaler.save(), cuda->scaler.save());
  cuda->scaler.load_state(other->scaler.state());
  EXPECT_EQ(cuda->scaler.get_scale(), 1024.0f);
}

TEST_F(DeviceScaler, AlarmsAreToldLater) {
  expect_same_on_both(with(DynamicScale{.init_scale = 2.0f}), [](Plain& loop) {
    for (unsigned step = 0; step < 3; ++step) {
      loop.backward(step, 1.0, 1, kInf);
      loop.step();
      loop.update();
    }
  });
  GradScaler silent(DynamicScale{.init_scale = 1.0f}, {.device = kDevice});
  Plain loop(true, DynamicScale{});
  const Host one(DType::kF32, 1, 1);
  const OnDevice loss(one.view());
  loop.backward(1, 1.0, 0, kNan);
  silent.scale(loss.view(), loss.view());
  silent.step(*loop.optimizer);
  expect_error(ErrorCode::kScaleCollapsed, "p1: 0 inf, 1 nan", [&] {
    silent.update();
    silent.report();
  });
}

TEST_F(DeviceScaler, AnyOtherOptimizerRunsToo) {
  class Own : public Optimizer {
   public:
    explicit Own(std::vector<Parameter> list) : Optimizer(std::move(list)) {}
    void apply(float multiplier, bool) override { applied += multiplier; }
    void skipped(const std::string& culprit) override { last = culprit; }
    float applied = 0.0f;
    std::string last;
  };
  Plain loop(true, DynamicScale{});
  Own own(loop.optimizer->parameters());
  loop.backward(1, 1.0, 2, kInf);
  EXPECT_FALSE(loop.scaler.step(own).applied);
  EXPECT_EQ(own.last, "p8192: 1 inf, 0 nan");
  loop.scaler.update();
  loop.backward(1, 1.0);
  EXPECT_TRUE(loop.scaler.step(own).applied);
  EXPECT_EQ(own.applied, 0x1p-15f);
}

TEST_F(DeviceScaler, WrongCallsAreRefused) {
  Plain loop(true, DynamicScale{});
  expect_error(ErrorCode::kUnsupported, "scale(loss, scaled)", [&] { loop.scaler.scale(1.0f); });
  expect_error(ErrorCode::kWrongOrder, "before any scale()",
               [&] { loop.scaler.step(*loop.optimizer); });
  expect_error(ErrorCode::kInvalidArgument, "kThrow", [&] {
    GradScaler(StaticScale{.on_overflow = OnOverflow::kThrow}, {.device = kDevice});
  });
  GradScaler scaler(DynamicScale{}, {.device = kDevice});
  const ScalePolicy throwing = DynamicScale{.on_overflow = OnOverflow::kThrow};
  expect_error(ErrorCode::kInvalidArgument, "kThrow", [&] { scaler.set_policy(throwing); });
  const std::string saved = GradScaler(throwing).save();
  expect_error(ErrorCode::kBadState, "kThrow", [&] { scaler.load(saved); });
  EXPECT_EQ(scaler.policy().on_overflow(), OnOverflow::kSkip);
  Host weight(DType::kF32, 8, 1), grad(DType::kF32, 8, 2);
  SGD here({{"here", weight.view(), grad.view()}});
  loop.scale();
  expect_error(ErrorCode::kMismatch, "'here' is not on", [&] { loop.scaler.step(here); });
  expect_error(ErrorCode::kMismatch, "not on the CUDA device",
               [&] { loop.scaler.scale(weight.view(), grad.view()); });
}

// Holds a stream up until it is told to go on.
class Blocked {
 public:
  explicit Blocked(cudaStream_t stream) {
    cudaLaunchHostFunc(
        stream,
        [](void* open) {
          while (!*static_cast<std::atomic<bool>*>(open)) {
          }
        },
        &open_);
  }
  ~Blocked() { open(); }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_ = false;
};

TEST_F(DeviceScaler, NothingInAStepWaitsForTheDevice) {
  Plain loop(true, DynamicScale{.growth_interval = 5});
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  const StreamScope scope(stream);
  const auto step = [&] {
    loop.scale();
    loop.scaler.step(*loop.optimizer, {.max_norm = 1.0f, .clear_grads = ClearGrads::kNever});
    loop.scaler.update();
  };
  loop.backward(1, 1.0);
  step();
  loop.scaler.report();
  {
    Blocked blocked(stream);
    for (int i = 0; i < 50; ++i) step();  // would hang here
    EXPECT_EQ(loop.scaler.try_report()->steps, 1) << "the newest that is done";
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  }
  EXPECT_EQ(loop.scaler.report().steps, 51);
  EXPECT_EQ(loop.scaler.state().steps(), 51);
  EXPECT_EQ(loop.optimizer->steps(0), 51);
  cudaStreamDestroy(stream);
}

TEST_F(DeviceScaler, AReplayedGraphGivesTheBitsOfEagerSteps) {
  const DynamicScale policy{.growth_interval = 7};
  Plain eager(true, policy), graphed(true, policy);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  const StreamScope scope(stream);
  const StepOptions options{.max_norm = 1.0f};
  const auto enqueue = [&](Plain& loop) {
    loop.scaler.step(*loop.optimizer, options);
    loop.scaler.update();
  };
  eager.scale();
  graphed.scale();
  enqueue(eager);
  enqueue(graphed);  // takes what memory there is to take
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  graphed.scale();
  enqueue(graphed);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t run = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
  std::mt19937 random(5);
  int bad = 0;
  for (unsigned step = 0; step < 1000; ++step) {
    cudaStreamSynchronize(stream);
    const int where = random() % 20 == 0 ? static_cast<int>(random() % 4) : -1;
    bad += where >= 0;
    eager.backward(step, 10.0, where, step % 2 == 0 ? kInf : kNan);
    // The graph scales its loss by itself; only the gradients change.
    for (size_t i = 0; i < 4; ++i) {
      cudaMemcpyAsync(graphed.grad(i).data, eager.grad(i).data, eager.grad(i).bytes(),
                      cudaMemcpyDefault, stream);
    }
    if (step % 100 == 50) {
      const double lr = 1e-3 / (1.0 + step);
      eager.optimizer->set_lr(lr);
      graphed.optimizer->set_lr(lr);
    }
    enqueue(eager);
    ASSERT_EQ(cudaGraphLaunch(run, stream), cudaSuccess);
    if (step % 250 == 249) {
      ASSERT_TRUE(eager.bits() == graphed.bits()) << step;
      ASSERT_EQ(eager.scaler.save(), graphed.scaler.save()) << step;
      EXPECT_EQ(eager.scaler.report().to_string(), graphed.scaler.report().to_string());
      EXPECT_EQ(graphed.scaler.report().steps, step + 2);
    }
  }
  EXPECT_EQ(graphed.scaler.state().skipped(), bad);
  EXPECT_GT(bad, 20);
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(DeviceScaler, ACaptureBeforeTheFirstStepSaysWhatToDo) {
  Plain loop(true, DynamicScale{});
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  const StreamScope scope(stream);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  loop.scale();
  expect_error(ErrorCode::kWrongOrder, "run the same step once before",
               [&] { loop.scaler.step(*loop.optimizer); });
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the capture is still good";
  cudaGraphDestroy(graph);
  loop.scaler.step(*loop.optimizer);
  EXPECT_TRUE(loop.scaler.report().applied);
  cudaStreamDestroy(stream);
}

TEST(ScalerReport, IsThereAtOnceOnTheCpu) {
  std::vector<float> weight = {1.0f}, grad = {1.0f};
  SGD optimizer({{"w", view(weight), view(grad)}});
  GradScaler scaler;
  EXPECT_FALSE(scaler.try_report().has_value());
  expect_error(ErrorCode::kWrongOrder, "before any step()", [&] { scaler.report(); });
  scaler.scale(1.0f);
  const StepReport report = scaler.step(optimizer);
  EXPECT_FALSE(report.pending);
  EXPECT_EQ(scaler.report().to_string(), report.to_string());
  EXPECT_EQ(scaler.try_report(optimizer)->steps, 1);
}

}  // namespace
}  // namespace headroom
