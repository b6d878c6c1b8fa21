// A scaler whose state is on the device: the same results as on the CPU, bit for bit, and no call
// waits for the device.
#include <atomic>
#include <random>
#include <thread>

#include "tests/cuda/loop.h"

namespace headroom {
namespace {

class DeviceScaler : public Cuda {};

TEST_F(DeviceScaler, EveryPresetMatchesTheCpu) {
  for (const PresetInfo& info : presets()) {
    ScalePolicy policy = preset(info.name);
    if (policy.if_dynamic() != nullptr) policy.set("growth_interval", 3);
    SCOPED_TRACE(info.name);
    expect_device_matches_cpu(loop_with(policy), [](AdamWLoop& loop) {
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

TEST_F(DeviceScaler, RetriesMatchTheCpu) {
  expect_device_matches_cpu(loop_with(preset("headroom-retry")), [](AdamWLoop& loop) {
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

TEST_F(DeviceScaler, OverflowInTheFirstStepLeavesNoMomentum) {
  using Momentum = Loop<SGD, SGDOptions>;
  expect_device_matches_cpu<Momentum>(
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

TEST_F(DeviceScaler, CompactStateMatchesTheCpuWhateverIsSkipped) {
  for (const StateFormat state : {StateFormat::kHalf, StateFormat::kByte}) {
    for (const DType type : {DType::kF16, DType::kBF16, DType::kF32}) {
      const Precision precision{.seed = 8, .state = state};
      expect_device_matches_cpu(
          loop_with(DynamicScale{}, true, type, precision), [](AdamWLoop& loop) {
            for (unsigned step = 0; step < 20; ++step) {
              loop.backward(step, 1000.0, step % 5 == 3 ? 2 : -1, kInf);
              const bool clear = step % 2 == 0;
              loop.step({.clear_grads = clear ? ClearGrads::kAlways : ClearGrads::kOnSkip});
              loop.update();
            }
            EXPECT_EQ(loop.optimizer->steps(0), 16);
          });
    }
  }
}

TEST_F(DeviceScaler, SquaresBeyondFp32AreNotAnOverflow) {
  expect_device_matches_cpu(loop_with(DynamicScale{}, true, DType::kF32), [](AdamWLoop& loop) {
    loop.backward(1, 1e30);
    loop.step({.max_norm = 1.0f});
    loop.update();
    EXPECT_EQ(loop.scaler.state().skipped(), 0);
  });
}

TEST_F(DeviceScaler, OverflowWhileUnscalingIsSkipped) {
  expect_device_matches_cpu(loop_with(StaticScale{0x1p-100f}, true, DType::kF32),
                            [](AdamWLoop& loop) {
                              loop.backward(1, 1e30);
                              loop.scaler.step(*loop.optimizer);
                              const StepReport report = loop.scaler.report();
                              EXPECT_FALSE(report.applied);
                              EXPECT_EQ(report.skip, Skip::kUnscaleOverflow);
                              EXPECT_NE(report.culprit.find("beyond FP32"), std::string::npos);
                              loop.update();
                            });
}

TEST_F(DeviceScaler, StepChecksGradientsAgainAfterUnscale) {
  for (const bool late_nan : {false, true}) {
    for (const bool bad : {false, true}) {
      expect_device_matches_cpu(loop_with(DynamicScale{.growth_interval = 2}),
                                [&](AdamWLoop& loop) {
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

TEST_F(DeviceScaler, PendingGradientsAreRescaledByUpdate) {
  const auto make = loop_with(DynamicScale{.growth_interval = 1});
  const auto cpu = make(false), cuda = make(true);
  for (AdamWLoop* loop : {cpu.get(), cuda.get()}) {
    loop->backward(1, 1.0);
    loop->step();
    loop->backward(2, 1.0);  // pending until the step after the update
    loop->update();
    loop->step();
    loop->update();
    expect_error(ErrorCode::kWrongOrder, "before any scale() in this round", [&] { loop->step(); });
  }
  EXPECT_EQ(cuda->log, cpu->log);
  EXPECT_TRUE(cuda->bits() == cpu->bits());
}

TEST_F(DeviceScaler, EachOptimizerHasItsOwnVerdict) {
  const auto run = [](bool cuda) {
    AdamWLoop a(cuda, DynamicScale{}), b(cuda, DynamicScale{});
    a.backward(1, 1.0, 2, kInf);
    b.backward(2, 1.0);
    a.scaler.step(*a.optimizer);
    a.scaler.step(*b.optimizer);
    a.scaler.update();
    EXPECT_FALSE(a.scaler.report(*a.optimizer).applied);
    EXPECT_TRUE(a.scaler.report(*b.optimizer).applied);
    EXPECT_TRUE(a.scaler.report().applied) << "the report of the last step";
    EXPECT_EQ(a.scaler.get_scale(), 32768.0f);
    auto bits = a.bits();
    for (auto& part : b.bits()) bits.push_back(part);
    return bits;
  };
  EXPECT_TRUE(run(false) == run(true));
}

TEST_F(DeviceScaler, RandomCallSequencesMatchTheCpu) {
  const auto run = [](bool cuda, unsigned seed) {
    const ScalePolicy policy = DynamicScale{.growth_interval = 2};
    AdamWLoop a(cuda, policy), b(cuda, policy);
    GradScaler& scaler = a.scaler;
    std::mt19937 random(seed);
    for (unsigned call = 0; call < 40; ++call) {
      AdamWLoop& one = random() % 2 == 0 ? a : b;
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

TEST_F(DeviceScaler, DisabledScalerSkipsNonFiniteGradients) {
  expect_device_matches_cpu(loop_with(DynamicScale{}, false), [](AdamWLoop& loop) {
    for (unsigned step = 0; step < 3; ++step) {
      loop.backward(step, 1.0, step == 1 ? 3 : -1, kNan);
      loop.step();
    }
  });
}

TEST_F(DeviceScaler, AcceptsAnExternalScale) {
  float* external = nullptr;  // scale, found_inf
  ASSERT_EQ(cudaMallocManaged(&external, 2 * sizeof(float)), cudaSuccess);
  expect_device_matches_cpu(loop_with(DynamicScale{}, false), [&](AdamWLoop& loop) {
    const auto step = [&](float scale, float found, int bad) {
      loop.backward(1, 1.0, bad, kNan);
      external[0] = scale;
      external[1] = found;
      loop.step({.max_norm = 1.0f}, {.scale = external, .found_inf = external + 1});
      cudaDeviceSynchronize();
    };
    step(1024.0f, 0.0f, -1);
    step(0.5f, 0.0f, 2);
    step(0.5f, 1.0f, -1);
    for (const float unusable : {0.0f, -1.0f, static_cast<float>(kInf), static_cast<float>(kNan)}) {
      step(unusable, 0.0f, -1);
    }
    step(3.0f, 0.0f, -1);
  });
  cudaFree(external);
}

TEST_F(DeviceScaler, StateCopiesBetweenHostAndDevice) {
  const auto make = loop_with(DynamicScale{.growth_interval = 2});
  const auto cpu = make(false), cuda = make(true);
  for (AdamWLoop* loop : {cpu.get(), cuda.get()}) {
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

TEST_F(DeviceScaler, AlarmsAreReportedAfterTheStep) {
  expect_device_matches_cpu(loop_with(DynamicScale{.init_scale = 2.0f}), [](AdamWLoop& loop) {
    for (unsigned step = 0; step < 3; ++step) {
      loop.backward(step, 1.0, 1, kInf);
      loop.step();
      loop.update();
    }
  });
  GradScaler without_callback(DynamicScale{.init_scale = 1.0f}, {.device = kDevice});
  AdamWLoop loop(true, DynamicScale{});
  const HostTensor one(DType::kF32, 1, 1);
  const DeviceCopy loss(one.view());
  loop.backward(1, 1.0, 0, kNan);
  without_callback.scale(loss.view(), loss.view());
  without_callback.step(*loop.optimizer);
  expect_error(ErrorCode::kScaleCollapsed, "p1: 0 inf, 1 nan", [&] {
    without_callback.update();
    without_callback.report();
  });
}

TEST_F(DeviceScaler, UserDefinedOptimizersWork) {
  class RecordingOptimizer : public Optimizer {
   public:
    explicit RecordingOptimizer(std::vector<Parameter> list) : Optimizer(std::move(list)) {}
    void apply(float multiplier, bool) override { applied += multiplier; }
    void skipped(const std::string& found) override { culprit = found; }
    float applied = 0.0f;
    std::string culprit;
  };
  AdamWLoop loop(true, DynamicScale{});
  RecordingOptimizer optimizer(loop.optimizer->parameters());
  loop.backward(1, 1.0, 2, kInf);
  EXPECT_FALSE(loop.scaler.step(optimizer).applied);
  EXPECT_EQ(optimizer.culprit, "p8192: 1 inf, 0 nan");
  loop.scaler.update();
  loop.backward(1, 1.0);
  EXPECT_TRUE(loop.scaler.step(optimizer).applied);
  EXPECT_EQ(optimizer.applied, 0x1p-15f);
}

TEST_F(DeviceScaler, InvalidCallsAreRejected) {
  AdamWLoop loop(true, DynamicScale{});
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
  HostTensor weight(DType::kF32, 8, 1), grad(DType::kF32, 8, 2);
  SGD on_host({{"on_host", weight.view(), grad.view()}});
  loop.scale();
  expect_error(ErrorCode::kMismatch, "'on_host' is not on", [&] { loop.scaler.step(on_host); });
  expect_error(ErrorCode::kMismatch, "not on the CUDA device",
               [&] { loop.scaler.scale(weight.view(), grad.view()); });
}

// Blocks a stream until open() or destruction.
class BlockedStream {
 public:
  explicit BlockedStream(cudaStream_t stream) {
    cudaLaunchHostFunc(
        stream,
        [](void* open) {
          while (!*static_cast<std::atomic<bool>*>(open)) {
          }
        },
        &open_);
  }
  ~BlockedStream() { open(); }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_ = false;
};

TEST_F(DeviceScaler, StepDoesNotWaitForTheDevice) {
  AdamWLoop loop(true, DynamicScale{.growth_interval = 5});
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
    BlockedStream blocked(stream);
    for (int i = 0; i < 50; ++i) step();  // a call that waited would hang here
    EXPECT_EQ(loop.scaler.try_report()->steps, 1) << "the latest completed step";
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  }
  EXPECT_EQ(loop.scaler.report().steps, 51);
  EXPECT_EQ(loop.scaler.state().steps(), 51);
  EXPECT_EQ(loop.optimizer->steps(0), 51);
  cudaStreamDestroy(stream);
}

TEST_F(DeviceScaler, GraphReplayMatchesEagerSteps) {
  const DynamicScale policy{.growth_interval = 7};
  AdamWLoop eager(true, policy), graphed(true, policy);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  const StreamScope scope(stream);
  const StepOptions options{.max_norm = 1.0f};
  const auto enqueue = [&](AdamWLoop& loop) {
    loop.scaler.step(*loop.optimizer, options);
    loop.scaler.update();
  };
  eager.scale();
  graphed.scale();
  enqueue(eager);
  enqueue(graphed);  // allocates everything that the captured step needs
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
    // The graph scales its own loss; only the gradients are copied.
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

TEST_F(DeviceScaler, CaptureBeforeTheFirstStepIsRejected) {
  AdamWLoop loop(true, DynamicScale{});
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  const StreamScope scope(stream);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  loop.scale();
  expect_error(ErrorCode::kWrongOrder, "run the same step once before",
               [&] { loop.scaler.step(*loop.optimizer); });
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the capture is still valid";
  cudaGraphDestroy(graph);
  loop.scaler.step(*loop.optimizer);
  EXPECT_TRUE(loop.scaler.report().applied);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace headroom
