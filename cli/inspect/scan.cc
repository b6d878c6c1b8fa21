#include <fmt/format.h>
#include <fnmatch.h>
#include <headroom/error.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>

#include "cli/inspect/inspection.h"
#include "cli/output.h"
#include "core/parallel.h"
#include "files/tensor_file.h"
#include "inspect/counter.h"

namespace headroom::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// A progress bar on standard error, if that is a terminal.
class ReadingBar {
 public:
  explicit ReadingBar(uint64_t total) : total_(total), shown_(isatty(STDERR_FILENO) == 1) {}
  ~ReadingBar() {
    if (drawn_) redraw("");
  }
  ReadingBar(const ReadingBar&) = delete;
  ReadingBar& operator=(const ReadingBar&) = delete;

  /// Thread-safe.
  void add(uint64_t bytes) {
    const uint64_t done = done_ += bytes;
    if (!shown_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto now = Clock::now();
    if (!lock.owns_lock() || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    draw(done, std::chrono::duration<double>(now - start_).count());
  }

 private:
  void draw(uint64_t done, double seconds) {
    const double part =
        static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total_, 1));
    const double rate = static_cast<double>(done) / seconds;
    const double left = static_cast<double>(total_ - std::min(done, total_)) / rate;
    const std::string facts =
        fmt::format("{:.2f} of {:.2f} GB, {:.2f} GB/s, {} left", 1e-9 * static_cast<double>(done),
                    1e-9 * static_cast<double>(total_), 1e-9 * rate, duration(left));
    const int width = terminal_width(STDERR_FILENO);
    const std::string line =
        "reading " + progress_bar(width - static_cast<int>(facts.size()) - 12, part) + facts;
    redraw(line.substr(0, static_cast<size_t>(width - 1)));
    drawn_ = true;
  }

  uint64_t total_;
  bool shown_;
  bool drawn_ = false;
  std::atomic<uint64_t> done_{0};
  std::mutex mutex_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
};

/// A range of elements that one thread reads.
struct Piece {
  size_t row;
  const files::Tensor* tensor;
  int64_t first;
  int64_t count;
};

constexpr int64_t kPieceBytes = int64_t{1} << 24;

bool wanted(const std::string& name, const std::vector<std::string>& patterns) {
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) {
           return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
         });
}

std::vector<Piece> cut(const files::Tensor& tensor, size_t row) {
  std::vector<Piece> pieces;
  const int64_t step =
      tensor.packed ? tensor.count : kPieceBytes / static_cast<int64_t>(size_of(tensor.dtype));
  for (int64_t first = 0; first < tensor.count; first += step) {
    pieces.push_back({row, &tensor, first, std::min(step, tensor.count - first)});
  }
  return pieces;
}

Format format_named(const std::string& name) {
  for (const Format format : {Format::kFP16, Format::kBF16, Format::kE5M2, Format::kE4M3}) {
    if (name == limits(format).name) return format;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("Format '{}' is unknown; choose fp16, bf16, e5m2 or e4m3.", name));
}

class Scanner {
 public:
  Scanner(Inspection* out, ReadingBar* bar) : out_(out), bar_(bar) {
    const auto& scale = out->options.scale;
    exact_ = scale.has_value() && !exact_power(*scale).has_value();
  }

  void read(const files::TensorFile& file) {
    out_->files.push_back({file.path(), {}});
    for (const files::LeftOut& left : file.left_out()) {
      out_->files.back().left_out.emplace_back(left.name, left.dtype);
    }
    std::vector<Piece> pieces;
    size_t bytes = 0;
    for (const files::Tensor& tensor : file.tensors()) {
      if (!wanted(tensor.name, out_->options.patterns)) continue;
      const std::vector<Piece> more = cut(tensor, out_->rows.size());
      pieces.insert(pieces.end(), more.begin(), more.end());
      bytes += static_cast<size_t>(tensor.count) * size_of(tensor.dtype);
      out_->rows.push_back(
          {out_->files.size() - 1, tensor.name, tensor.dtype, tensor.shape, {}, {}});
    }
    internal::parallel_for(pieces.size(), bytes, [&](size_t i) { count(file, pieces[i]); });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void count(const files::TensorFile& file, const Piece& piece) {
    if (failed_) return;
    try {
      const DType dtype = piece.tensor->dtype;
      internal::MagnitudeCounter counter(dtype);
      Outcome exact;
      const double stored_per_element = static_cast<double>(piece.tensor->stored_bytes) /
                                        static_cast<double>(piece.tensor->count);
      file.read(*piece.tensor, piece.first, piece.count, [&](const void* data, int64_t elements) {
        counter.add(data, elements);
        if (exact_)
          add(outcome_at(view(data, dtype, elements), out_->format, *out_->options.scale), &exact);
        bar_->add(static_cast<uint64_t>(stored_per_element * static_cast<double>(elements)));
      });
      const std::lock_guard lock(mutex_);
      Row& row = out_->rows[piece.row];
      counter.finish(&row.magnitudes);
      add(exact, &row.exact);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      failed_ = true;
    }
  }

  static void add(const Outcome& part, Outcome* whole) {
    whole->flushed += part.flushed;
    whole->subnormal += part.subnormal;
    whole->overflow += part.overflow;
  }

  Inspection* out_;
  ReadingBar* bar_;
  bool exact_ = false;
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace

Inspection scan(const InspectOptions& options) {
  Inspection inspection;
  inspection.options = options;
  inspection.options.lose += 0.0;  // -0 becomes 0
  inspection.format = format_named(options.format);
  uint64_t bytes = 0;
  for (const std::string& path : options.files) bytes += files::File(path).size();
  {
    ReadingBar bar(bytes);
    Scanner scanner(&inspection, &bar);
    for (const std::string& path : options.files) {
      scanner.read(files::TensorFile(path, {options.as == "bf16"}));
    }
  }
  if (inspection.rows.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                options.patterns.empty()
                    ? fmt::format("'{}' holds no tensors.", options.files.front())
                    : fmt::format("No tensor's name matches '{}'.", options.patterns.front()));
  }
  for (const Row& row : inspection.rows) {
    inspection.total.magnitudes.merge(row.magnitudes);
    inspection.total.exact.flushed += row.exact.flushed;
    inspection.total.exact.subnormal += row.exact.subnormal;
    inspection.total.exact.overflow += row.exact.overflow;
  }
  inspection.total.name = "total";
  inspection.advice = advise(inspection.total.magnitudes, {inspection.format, options.lose});
  return inspection;
}

}  // namespace headroom::cli
