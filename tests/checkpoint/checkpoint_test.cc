#include <gtest/gtest.h>
#include <headroom/headroom.h>
#include <headroom/tools.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "checkpoint/format.h"
#include "files/tensor_file.h"
#include "tests/record/folder.h"
#include "tests/support.h"

namespace headroom {
namespace {

namespace fs = std::filesystem;

const std::string kState = R"({"scaler": "anything", "text": "\u00e9 \" \\"})";

struct Model {
  std::vector<float> weight = {1.0f, -2.0f, 0x1p-149f, 4.0f, 5.0f, 6.0f};
  std::vector<f16> half = {f16(0.5f), f16(65504.0f), f16(-0.0f)};
  std::vector<bf16> brain = {bf16(3.0f)};
  std::vector<double> wide = {1e300};
  std::vector<float> none;

  std::vector<CheckpointTensor> tensors() {
    return {{"a.weight", view(weight), {2, 3}},
            {"a.weight/half", view(half)},
            {"b", view(brain), {1, 1, 1}},
            {"wide", view(wide)},
            {"none", view(none), {0, 7}}};
  }
};

std::vector<std::string> list_checkpoints(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != "checkpoint.lock") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(CheckpointFolder, LoadReturnsTheSavedBits) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(7, model.tensors(), kState);
  const Checkpoint loaded = checkpoints.load();
  EXPECT_EQ(loaded.step(), 7);
  EXPECT_EQ(loaded.state(), kState);
  const std::vector<CheckpointTensor> saved = model.tensors();
  ASSERT_EQ(loaded.tensors().size(), saved.size());
  for (const CheckpointTensor& tensor : saved) {
    const CheckpointTensor* const found = loaded.find(tensor.name);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->tensor.dtype, tensor.tensor.dtype);
    ASSERT_EQ(found->tensor.count, tensor.tensor.count);
    if (tensor.tensor.count == 0) continue;
    EXPECT_EQ(std::memcmp(found->tensor.data, tensor.tensor.data, tensor.tensor.bytes()), 0);
  }
  EXPECT_EQ(loaded.find("a.weight")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(loaded.find("nothing"), nullptr);
}

TEST(CheckpointFolder, FilesAreValidSafetensors) {
  const Folder folder;
  Model model;
  CheckpointFolder(folder.path("run")).save(12, model.tensors(), kState);
  const files::TensorFile file(folder.path("run") + "/checkpoint-000012.safetensors");
  EXPECT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.tensors()[0].name, "a.weight");
  EXPECT_EQ(file.tensors()[0].offset % 64, 0u);
}

TEST(CheckpointFolder, MovedFromFolderRejectsEveryCall) {
  const Folder temporary;
  CheckpointFolder moved_from(temporary.path("run"));
  const CheckpointFolder moved_to = std::move(moved_from);
  // NOLINTBEGIN(bugprone-use-after-move)
  for (const std::function<void()>& call : std::initializer_list<std::function<void()>>{
           [&] { moved_from.load(); }, [&] { moved_from.save(1, {}, ""); },
           [&] { moved_from.clear(); }, [&] { moved_from.folder(); }}) {
    expect_error(ErrorCode::kInvalidArgument, "was moved from", call);
  }  // NOLINTEND(bugprone-use-after-move)
}

TEST(CheckpointFolder, KeepsTheLastTwoCheckpoints) {
  const Folder folder;
  Model model;
  {
    CheckpointFolder checkpoints(folder.path("run"));
    for (const int64_t step : {1, 5, 2000000}) checkpoints.save(step, model.tensors(), "");
    EXPECT_EQ(list_checkpoints(folder.path("run")),
              (std::vector<std::string>{"checkpoint-000005.safetensors",
                                        "checkpoint-2000000.safetensors"}));
  }
  folder.write("run/checkpoint-000001.safetensors.99.tmp", "half of it");
  CheckpointFolder again(folder.path("run"));
  EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 2u);
  EXPECT_EQ(again.load().step(), 2000000);
  // Saving after a fallback drops the checkpoints that are newer than the loaded one.
  folder.write("run/checkpoint-2000000.safetensors", "damaged");
  EXPECT_EQ(again.load().step(), 5);
  again.save(6, model.tensors(), "");
  EXPECT_EQ(
      list_checkpoints(folder.path("run")),
      (std::vector<std::string>{"checkpoint-000005.safetensors", "checkpoint-000006.safetensors"}));
  again.clear();
  EXPECT_TRUE(list_checkpoints(folder.path("run")).empty());
  expect_error(ErrorCode::kBadState, "There is no good checkpoint in", [&] { again.load(); });
}

TEST(CheckpointFolder, LoadDetectsEveryTruncationAndEveryFlippedBit) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, model.tensors(), "old");
  checkpoints.save(2, model.tensors(), kState);
  const std::string path = "run/checkpoint-000002.safetensors";
  const std::string whole = folder.read(path);
  int64_t found = 0, tried = 0;
  const auto expect_older = [&](const std::string& damaged) {
    folder.write(path, damaged);
    std::vector<std::string> skipped;
    const Checkpoint loaded = checkpoints.load(nullptr, &skipped);
    ++tried;
    found += loaded.step() == 1 && skipped.size() == 1 &&
             skipped[0].find("checkpoint-000002") != std::string::npos;
  };
  for (size_t length = 0; length < whole.size(); ++length) expect_older(whole.substr(0, length));
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    expect_older(flipped);
  }
  expect_older(whole + std::string(1, '\0'));
  EXPECT_EQ(found, tried);
  EXPECT_GT(tried, 9 * 512);
  folder.write(path, whole);
  EXPECT_EQ(checkpoints.load().step(), 2);
}

TEST(CheckpointFolder, LoadFallsBackIfTheCallerRejectsACheckpoint) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, model.tensors(), "good");
  checkpoints.save(2, model.tensors(), "bad");
  const auto take = [](const Checkpoint& checkpoint) {
    if (checkpoint.state() == "bad") throw Error(ErrorCode::kBadState, "It lies.");
  };
  std::vector<std::string> skipped;
  EXPECT_EQ(checkpoints.load(take, &skipped).step(), 1);
  EXPECT_EQ(skipped, std::vector<std::string>{"It lies."});
  // Errors with other codes are passed on: they do not mean that the checkpoint is damaged.
  expect_error(ErrorCode::kInvalidArgument, "Another model", [&] {
    checkpoints.load(
        [](const Checkpoint&) { throw Error(ErrorCode::kInvalidArgument, "Another model."); });
  });
  fs::rename(folder.path("run") + "/checkpoint-000002.safetensors",
             folder.path("run") + "/checkpoint-000009.safetensors");
  EXPECT_EQ(checkpoints.load(nullptr, &skipped).step(), 1);
  EXPECT_NE(skipped.back().find("is of step 2, not of the step in its name"), std::string::npos);
  fs::remove(folder.path("run") + "/checkpoint-000009.safetensors");
  fs::create_directory(folder.path("run") + "/checkpoint-000009.safetensors");
  EXPECT_EQ(checkpoints.load(nullptr, &skipped).step(), 1);
  EXPECT_NE(skipped.back().find("it is a folder"), std::string::npos);
}

TEST(CheckpointFolder, FullDiskLeavesThePreviousCheckpointIntact) {
  const Folder folder;
  std::vector<float> large(1 << 16, 1.0f);
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, {{"w", view(large)}}, "first");
  expect_error(ErrorCode::kFile, "checkpoint-000002.safetensors' could not be written", [&] {
    const FileSizeLimit limit(1 << 17);
    checkpoints.save(2, {{"w", view(large)}}, "second");
  });
  EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 1u) << "no partial file remains";
  EXPECT_EQ(checkpoints.load().state(), "first");
}

TEST(CheckpointFolder, LinksAndPipesAreNeitherWrittenNorLoaded) {
  const Folder folder;
  Model model;
  const std::string run = folder.path("run");
  folder.write("victim", "precious");
  fs::create_directory(run);
  fs::create_symlink(folder.path("victim"), run + "/checkpoint.lock");
  expect_error(ErrorCode::kFile, "checkpoint.lock' could not be written: it is a symbolic link",
               [&] { CheckpointFolder checkpoints(run); });
  fs::remove(run + "/checkpoint.lock");
  CheckpointFolder checkpoints(run);
  checkpoints.save(1, model.tensors(), "first");
  fs::copy(run + "/checkpoint-000001.safetensors", folder.path("elsewhere"));
  for (const bool pipe : {false, true}) {
    const std::string path = run + "/checkpoint-000002.safetensors";
    if (pipe) {
      ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    } else {
      fs::create_symlink(folder.path("elsewhere"), path);
    }
    expect_error(ErrorCode::kFile, pipe ? "it is a pipe" : "it is a symbolic link",
                 [&] { checkpoints.save(2, model.tensors(), "second"); });
    std::vector<std::string> skipped;
    EXPECT_EQ(checkpoints.load(nullptr, &skipped).step(), 1);
    ASSERT_EQ(skipped.size(), 1u);
    EXPECT_NE(skipped[0].find(pipe ? "not a regular file" : "it is a symbolic link"),
              std::string::npos);
    fs::remove(path);
  }
  EXPECT_EQ(folder.read("victim"), "precious");
}

TEST(CheckpointFolder, ReaderRetriesIfTheOwnerReplacedEveryCheckpoint) {
  const Folder folder;
  Model model;
  CheckpointFolder owner(folder.path("run"));
  owner.save(1, model.tensors(), "");
  owner.save(2, model.tensors(), "");
  CheckpointFolder reader(folder.path("run"), FolderUse::kRead);
  const auto take = [&](const Checkpoint& checkpoint) {
    if (checkpoint.step() > 2) return;
    for (const int64_t step : {3, 4}) owner.save(step, model.tensors(), "");  // removes 1 and 2
    throw Error(ErrorCode::kBadState, "It lies.");
  };
  std::vector<std::string> skipped;
  EXPECT_EQ(reader.load(take, &skipped).step(), 4);
  EXPECT_TRUE(skipped.empty());
}

TEST(CheckpointFolder, SkippedCheckpointsAreReportedEvenIfTheCallerThrows) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, model.tensors(), "");
  checkpoints.save(2, model.tensors(), "");
  folder.write("run/checkpoint-000002.safetensors", "damaged");
  std::vector<std::string> skipped;
  const auto take = [](const Checkpoint&) { throw Error(ErrorCode::kMismatch, "Another model."); };
  expect_error(ErrorCode::kMismatch, "Another model", [&] { checkpoints.load(take, &skipped); });
  EXPECT_EQ(skipped.size(), 1u);
}

TEST(CheckpointFolder, ReadOnlyFolderRefusesToChangeAnything) {
  const Folder folder;
  Model model;
  CheckpointFolder owner(folder.path("run"));
  owner.save(1, model.tensors(), "");
  CheckpointFolder reader(folder.path("run"), FolderUse::kRead);
  expect_error(ErrorCode::kWrongOrder, "opened for reading",
               [&] { reader.save(2, model.tensors(), ""); });
  expect_error(ErrorCode::kWrongOrder, "opened for reading", [&] { reader.clear(); });
  EXPECT_EQ(owner.load().step(), 1);
  CheckpointFolder moved = std::move(owner);  // takes the lock with it
  EXPECT_EQ(moved.folder(), folder.path("run"));
  expect_error(ErrorCode::kFile, "another run", [&] { CheckpointFolder other(moved.folder()); });
  CheckpointFolder nowhere(folder.path("none"), FolderUse::kRead);
  expect_error(ErrorCode::kFile, "cannot be read", [&] { nowhere.load(); });
}

TEST(CheckpointFolder, OtherFormatVersionIsRefused) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, model.tensors(), "");
  const std::string name = "run/checkpoint-000001.safetensors";
  std::string bytes = folder.read(name);
  const std::string version = "\"version\":\"1\"";
  ASSERT_NE(bytes.find(version), std::string::npos);
  bytes[bytes.find(version) + version.size() - 2] = '2';
  using namespace internal;
  bytes.replace(kChecksumAt, kChecksumDigits, kChecksumDigits, '0');
  bytes.replace(kChecksumAt, kChecksumDigits, checksum_of({bytes}));
  folder.write(name, bytes);
  expect_error(ErrorCode::kBadState, "a format or version that", [&] { checkpoints.load(); });
}

TEST(CheckpointFolder, SecondWriterOfAFolderIsRefused) {
  const Folder folder;
  const CheckpointFolder first(folder.path("run"));
  expect_error(ErrorCode::kFile, "being written by another run",
               [&] { CheckpointFolder second(folder.path("run")); });
  expect_error(ErrorCode::kFile, "cannot be created",
               [] { CheckpointFolder nowhere("/proc/no/such/folder"); });
}

TEST(CheckpointFolder, InvalidSaveIsRefusedAndChangesNothing) {
  const Folder folder;
  Model model;
  CheckpointFolder checkpoints(folder.path("run"));
  checkpoints.save(1, model.tensors(), "first");
  const auto refuse = [&](ErrorCode code, const char* part, int64_t step,
                          const std::vector<CheckpointTensor>& tensors, const std::string& state) {
    expect_error(code, part, [&] { checkpoints.save(step, tensors, state); });
  };
  const TensorView w = view(model.weight);
  refuse(ErrorCode::kInvalidArgument, "0 or more", -1, {}, "");
  refuse(ErrorCode::kInvalidArgument, "not unique", 2, {{"w", w}, {"w", w}}, "");
  refuse(ErrorCode::kInvalidArgument, "reserved", 2, {{"__metadata__", w}}, "");
  refuse(ErrorCode::kInvalidArgument, "empty", 2, {{"", w}}, "");
  refuse(ErrorCode::kInvalidArgument, "not UTF-8", 2, {{"w\xff", w}}, "");
  refuse(ErrorCode::kInvalidArgument, "not UTF-8", 2, {}, "\xff");
  refuse(ErrorCode::kInvalidArgument, "100 MB", 2, {}, std::string(100'000'001, ' '));
  refuse(ErrorCode::kMismatch, "does not match its number of elements", 2, {{"w", w, {2, 2}}}, "");
  refuse(ErrorCode::kInvalidArgument, "null", 2, {{"w", view(static_cast<float*>(nullptr), 3)}},
         "");
  refuse(ErrorCode::kInvalidArgument, "unknown type", 2,
         {{"w", view(w.data, static_cast<DType>(9), 0)}}, "");
  refuse(ErrorCode::kUnsupported, "not on the CPU", 2,
         {{"w", view(w.data, DType::kF32, 6, {DeviceType::kCUDA, 0})}}, "");
  EXPECT_EQ(checkpoints.load().state(), "first");
  checkpoints.save(0, {}, "");  // a checkpoint may be empty
}

TEST(CheckpointFolder, KeepsTwoThoughOneIsSavedTwice) {
  const Folder folder;
  {
    CheckpointFolder checkpoints(folder.path("run"));
    for (const int64_t step : {1, 2, 3, 3}) checkpoints.save(step, {}, "");
    EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 2u);
  }
  CheckpointFolder again(folder.path("run"));
  EXPECT_EQ(again.load().step(), 3);
  again.save(3, {}, "");
  EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 2u);
}

TEST(CheckpointFolder, SavingAnEarlierStepDropsLaterCheckpoints) {
  const Folder folder;
  CheckpointFolder checkpoints(folder.path("run"));
  for (const int64_t step : {5, 100, 10}) checkpoints.save(step, {}, "");
  EXPECT_EQ(checkpoints.load().step(), 10);
  EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 2u) << "5 and 10";
}

TEST(CheckpointFolder, FileErrorOfTheCallerIsNotTakenForDamage) {
  const Folder folder;
  CheckpointFolder checkpoints(folder.path("run"));
  for (const int64_t step : {1, 2}) checkpoints.save(step, {}, "");
  expect_error(ErrorCode::kFile, "elsewhere", [&] {
    checkpoints.load([](const Checkpoint&) { throw Error(ErrorCode::kFile, "elsewhere"); });
  });
  EXPECT_EQ(checkpoints.load().step(), 2);
}

TEST(CheckpointFolder, EveryStepOf64BitsCanBeSaved) {
  const Folder folder;
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  CheckpointFolder checkpoints(folder.path("run"));
  for (const int64_t step : {kLast - 2, kLast - 1, kLast}) checkpoints.save(step, {}, "");
  EXPECT_EQ(list_checkpoints(folder.path("run")).size(), 2u);
  EXPECT_EQ(checkpoints.load().step(), kLast);
}

}  // namespace
}  // namespace headroom
