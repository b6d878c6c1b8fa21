// The progress bar of commands that read large files.
#ifndef HEADROOM_CLI_INSPECT_READING_BAR_H_
#define HEADROOM_CLI_INSPECT_READING_BAR_H_

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "cli/output.h"

namespace headroom::cli {

/// A progress bar on standard error, if that is a terminal.
class ReadingBar {
 public:
  ReadingBar() = default;
  ~ReadingBar() {
    if (drawn_) redraw("");
  }
  ReadingBar(const ReadingBar&) = delete;
  ReadingBar& operator=(const ReadingBar&) = delete;

  /// Shows how many bytes of `total` are read. Thread-safe.
  void show(uint64_t done, uint64_t total) {
    if (!shown_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto now = std::chrono::steady_clock::now();
    if (!lock.owns_lock() || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    draw(done, total, std::chrono::duration<double>(now - start_).count());
  }

 private:
  void draw(uint64_t done, uint64_t total, double seconds) {
    const double part =
        static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total, 1));
    const double rate = static_cast<double>(done) / seconds;
    const double left = static_cast<double>(total - std::min(done, total)) / rate;
    const std::string facts =
        fmt::format("{:.2f} of {:.2f} GB, {:.2f} GB/s, {} left", 1e-9 * static_cast<double>(done),
                    1e-9 * static_cast<double>(total), 1e-9 * rate, duration(left));
    const int width = terminal_width(STDERR_FILENO);
    const std::string line =
        "reading " + progress_bar(width - static_cast<int>(facts.size()) - 12, part) + facts;
    redraw(line.substr(0, static_cast<size_t>(width - 1)));
    drawn_ = true;
  }

  const bool shown_ = isatty(STDERR_FILENO) == 1;
  bool drawn_ = false;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_ = start_;
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_INSPECT_READING_BAR_H_
