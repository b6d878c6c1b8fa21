// Resuming a run on its existing files.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <headroom/record.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "record/history.h"
#include "tests/record/folder.h"
#include "tests/support.h"

namespace headroom {
namespace {

using std::string_literals::operator""s;

RunInfo resumed_run() {
  RunInfo info;
  info.resume = true;
  return info;
}

// Limits the process to `more` additional open files while it lives.
class OpenFileLimit {
 public:
  explicit OpenFileLimit(rlim_t more) {
    const int next = open("/dev/null", O_RDONLY);
    close(next);
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {static_cast<rlim_t>(next) + more, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~OpenFileLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Recorder, ResumeTruncatesADamagedHistoryAndNotesIt) {
  const Folder folder;
  { Recorder(folder.path("run")).step(1, 1.0, applied()); }
  folder.write("run/history.jsonl", folder.read("run/history.jsonl") + "garbage\n{\"step\":3}\n");
  { Recorder(folder.path("run"), resumed_run()).step(2, 1.0, applied()); }
  internal::HistoryReader reader(folder.path("run/history.jsonl"));
  reader.read_more();
  EXPECT_EQ(reader.history().steps.size(), 2u);
  ASSERT_EQ(reader.history().notes.size(), 1u);
  EXPECT_NE(reader.history().notes[0].text.find("history.jsonl:3:"), std::string::npos);
}

TEST(Resume, UnreadableFilesAreRefusedAndUnchanged) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer itself opens files to check addresses";
#endif
  const Folder folder;
  RunInfo info;
  info.tensorboard = true;
  {
    Recorder recorder(folder.path("run"), info);
    for (int64_t step = 1; step <= 5; ++step) recorder.step(step, 1.0, applied());
  }
  const std::string history = folder.read("run/history.jsonl");
  const std::string events = folder.read("run/events.out.tfevents.headroom");
  for (const rlim_t more : {0, 1, 2}) {
    const OpenFileLimit limit(more);
    expect_error(ErrorCode::kFile, "",
                 [&] { Recorder recorder(folder.path("run"), resumed_run()); });
  }
  EXPECT_EQ(folder.read("run/history.jsonl"), history);
  EXPECT_EQ(folder.read("run/events.out.tfevents.headroom"), events);
  Recorder(folder.path("run"), resumed_run()).step(6, 1.0, applied());
}

TEST(Resume, HistoryOfAnotherVersionIsRefusedAndUnchanged) {
  const Folder folder;
  { Recorder(folder.path("run")).step(1, 1.0, applied()); }
  std::string other = folder.read("run/history.jsonl");
  other.replace(other.find("\"version\":1"), 11, "\"version\":9");
  for (const std::string& text : {other, std::string("this is not a history\n")}) {
    folder.write("run/history.jsonl", text);
    expect_error(ErrorCode::kBadState, "move it away",
                 [&] { Recorder recorder(folder.path("run"), resumed_run()); });
    EXPECT_EQ(folder.read("run/history.jsonl"), text);
  }
}

TEST(Resume, RewindSupportsNegativeSteps) {
  const Folder folder;
  RunInfo info;
  info.tensorboard = true;
  Recorder recorder(folder.path("run"), info);
  for (int64_t step = -5; step <= -1; ++step) recorder.step(step, 1.0, applied());
  const size_t all = folder.read("run/events.out.tfevents.headroom").size();
  recorder.rewind(-1);
  EXPECT_EQ(folder.read("run/events.out.tfevents.headroom").size(), all);
  recorder.rewind(-3);
  const size_t kept = folder.read("run/events.out.tfevents.headroom").size();
  EXPECT_LT(kept, all);
  EXPECT_GT(kept, all / 2);
}

TEST(Resume, EventsHaveOneStartAndOneEnd) {
  const Folder folder;
  RunInfo info;
  info.tensorboard = true;
  for (const int64_t until : {-2, 0, 3}) {
    info.resume = until > -2;
    Recorder recorder(folder.path("run"), info);
    if (info.resume) recorder.rewind(until);
    recorder.step(until + 1, 1.0, applied());
    recorder.finish({{"accuracy", 1.0}});
    const std::string events = folder.read("run/events.out.tfevents.headroom");
    for (const std::string tag : {"session_start_info", "session_end_info"}) {
      const size_t first = events.find(tag);
      EXPECT_NE(first, std::string::npos) << tag << " after " << until;
      EXPECT_EQ(events.find(tag, first + 1), std::string::npos) << tag << " after " << until;
    }
  }
}

// A planted link must not be followed and a pipe must not block the run.
TEST(Recorder, LinksAndPipesInPlaceOfItsFilesAreRefused) {
  RunInfo info;
  info.tensorboard = true;
  for (const char* name : {"history.jsonl", "events.out.tfevents.headroom"}) {
    for (const bool resume : {false, true}) {
      info.resume = resume;
      const auto expect_file_refused = [&](const std::string& part, const Folder& folder) {
        expect_error(ErrorCode::kFile, std::string(name) + "' could not be written: it is " + part,
                     [&] { Recorder(folder.path("run"), info); });
      };
      const Folder folder;
      folder.write("victim", "precious");
      std::filesystem::create_directories(folder.path("run"));
      const std::string path = folder.path("run/") + name;
      for (const std::string& to : {folder.path("victim"), folder.path("none"), "/dev/null"s}) {
        std::filesystem::create_symlink(to, path);
        expect_file_refused("a symbolic link", folder);
        std::filesystem::remove(path);
      }
      EXPECT_EQ(folder.read("victim"), "precious");
      EXPECT_FALSE(std::filesystem::exists(folder.path("none")));
      ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
      expect_file_refused("a pipe", folder);
      const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
      expect_file_refused("a pipe", folder);
      close(reader);
    }
  }
}

TEST(Recorder, ReservedAndDuplicateScalarNamesAreRefused) {
  const Folder folder;
  Recorder recorder(folder.path("run"));
  expect_error(ErrorCode::kInvalidArgument, "reserved for the history", [&] {
    recorder.step(1, 1.0, applied(), {{"skipped", 1.0}});
  });
  expect_error(ErrorCode::kInvalidArgument, "two numbers named 'lr'", [&] {
    recorder.step(1, 1.0, applied(), {{"lr", 1.0}, {"lr", 2.0}});
  });
  recorder.step(1, 1.0, applied(), {{"lr", 1.0}});
}

}  // namespace
}  // namespace headroom
