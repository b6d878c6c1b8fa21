// Memory of masters and moments from an allocator of the user's.
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "tests/support.h"

namespace headroom {
namespace {

// Counts its blocks, and fails or returns unaligned memory on request.
struct CountingAllocator {
  struct Block {
    const char* begin;
    size_t bytes;
  };
  std::vector<Block> blocks;
  int alive = 0;
  bool fails = false;
  size_t offset = 0;

  StateAllocator function() {
    return [this](size_t bytes, const Device& device) -> std::shared_ptr<void> {
      EXPECT_EQ(device.type, DeviceType::kCPU);
      if (fails) throw std::runtime_error("out of memory");
      const size_t whole = (bytes + 127) / 64 * 64;
      auto* const memory = static_cast<char*>(std::aligned_alloc(64, whole));
      std::memset(memory, 0x5A, whole);  // its contents must not matter
      blocks.push_back({memory + offset, bytes});
      ++alive;
      return {memory + offset, [this, memory](void*) {
                std::free(memory);
                --alive;
              }};
    };
  }

  bool owns(const TensorView& view) const {
    const auto* const data = static_cast<const char*>(view.data);
    return std::any_of(blocks.begin(), blocks.end(), [&](const Block& block) {
      return data >= block.begin && data + view.bytes() <= block.begin + block.bytes;
    });
  }
};

struct Tensors {
  std::vector<f16> w16 = random_values<f16>(1000, 1), g16 = random_values<f16>(1000, 2);
  std::vector<float> w32 = random_values<float>(70, 3), g32 = random_values<float>(70, 4);
  std::vector<Parameter> halves() { return {{"half", view(w16), view(g16)}}; }
  std::vector<Parameter> floats() { return {{"full", view(w32), view(g32)}}; }
};

TEST(StateAllocator, MemoryIsAllocatedByTheFirstStepAndFreedWithTheOptimizer) {
  CountingAllocator allocator;
  Tensors ours, plain;
  AdamW expected(plain.halves());
  {
    AdamW optimizer({});
    optimizer.set_allocator(allocator.function());
    optimizer.add_group(ours.halves(), {});
    EXPECT_EQ(optimizer.allocated(), 0u);
    EXPECT_TRUE(optimizer.state().tensors.empty());
    EXPECT_TRUE(allocator.blocks.empty());
    for (int i = 0; i < 3; ++i) {
      optimizer.apply(0.5f, false);
      expected.apply(0.5f, false);
    }
    EXPECT_EQ(allocator.blocks.size(), 1u);
    EXPECT_EQ(optimizer.state().tensors.size(), 3u);
    for (const NamedTensor& named : optimizer.state().tensors) {
      EXPECT_TRUE(allocator.owns(named.tensor)) << named.name;
    }
    EXPECT_EQ(bytes_of(ours.w16), bytes_of(plain.w16));

    optimizer.add_group(ours.floats(), {});
    EXPECT_EQ(optimizer.allocated(), 1u);
    optimizer.apply(0.5f, false);
    EXPECT_EQ(optimizer.allocated(), 2u);
    EXPECT_EQ(allocator.blocks.size(), 2u);
    AdamW moved = std::move(optimizer);
    moved.apply(0.5f, false);
    EXPECT_EQ(allocator.alive, 2);
  }
  EXPECT_EQ(allocator.alive, 0);
}

TEST(StateAllocator, FailureOfTheAllocatorChangesNothing) {
  CountingAllocator allocator;
  allocator.fails = true;
  Tensors ours;
  AdamW optimizer({});
  optimizer.set_allocator(allocator.function());
  optimizer.add_group(ours.halves(), {});
  const auto before = bytes_of(ours.w16);
  EXPECT_THROW(optimizer.apply(0.5f, true), std::runtime_error);
  EXPECT_THROW(optimizer.load_state({}), std::runtime_error);
  EXPECT_EQ(bytes_of(ours.w16), before);
  EXPECT_EQ(optimizer.steps(0), 0);
  allocator.fails = false;
  allocator.offset = 4;
  expect_error(ErrorCode::kInvalidArgument, "64 bytes", [&] { optimizer.allocate(); });
  EXPECT_EQ(allocator.alive, 0);
  allocator.offset = 0;
  optimizer.apply(0.5f, true);
  EXPECT_EQ(optimizer.steps(0), 1);
}

TEST(StateAllocator, TypesOfWeightsMayChangeBeforeTheFirstStep) {
  CountingAllocator allocator;
  Tensors ours, plain;
  std::vector<bf16> weight = random_values<bf16>(70, 3), grad = random_values<bf16>(70, 4);
  std::vector<bf16> expected_weight = weight;
  AdamW optimizer({});
  optimizer.set_allocator(allocator.function());
  optimizer.add_group(ours.floats(), {});
  const std::vector<Parameter> changed = {{"full", view(weight), view(grad)}};
  optimizer.rebind(changed);
  weight[3] = expected_weight[3] =
      bf16(5.0f);  // masters are made from the weights of the first step
  AdamW expected({{"full", view(expected_weight), view(grad)}});
  optimizer.apply(0.5f, false);
  expected.apply(0.5f, false);
  EXPECT_EQ(bytes_of(weight), bytes_of(expected_weight));
  expect_error(ErrorCode::kMismatch, "70 elements of bf16",
               [&] { optimizer.rebind(ours.floats()); });
}

TEST(StateAllocator, IsNotCalledWithoutMastersAndMoments) {
  CountingAllocator allocator;
  allocator.fails = true;
  Tensors ours;
  SGD optimizer({});
  optimizer.set_allocator(allocator.function());
  optimizer.add_group(ours.floats(), {});
  optimizer.apply(0.5f, false);
  EXPECT_EQ(optimizer.steps(0), 1);
}

}  // namespace
}  // namespace headroom
