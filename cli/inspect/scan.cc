#include <fmt/format.h>
#include <fnmatch.h>
#include <headroom/error.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "cli/inspect/inspection.h"
#include "cli/inspect/reading_bar.h"
#include "files/pieces.h"
#include "files/tensor_file.h"
#include "inspect/counter.h"

namespace headroom::cli {
namespace {

bool wanted(const std::string& name, const std::vector<std::string>& patterns) {
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) {
           return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
         });
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
  Scanner(Inspection* out, uint64_t bytes) : out_(out), bytes_(bytes) {
    const auto& scale = out->options.scale;
    exact_ = scale.has_value() && !exact_power(*scale).has_value();
  }

  void read(const files::TensorFile& file) {
    out_->files.push_back({file.path(), {}});
    for (const files::LeftOut& left : file.left_out()) {
      out_->files.back().left_out.emplace_back(left.name, left.dtype);
    }
    const size_t first_row = out_->rows.size();
    std::vector<const files::Tensor*> tensors;
    for (const files::Tensor& tensor : file.tensors()) {
      if (!wanted(tensor.name, out_->options.patterns)) continue;
      tensors.push_back(&tensor);
      out_->rows.push_back(
          {out_->files.size() - 1, tensor.name, tensor.dtype, tensor.shape, {}, {}});
    }
    files::for_each_piece(tensors, [&](size_t i, int64_t first, int64_t count) {
      this->count(file, *tensors[i], first, count, &out_->rows[first_row + i]);
    });
  }

 private:
  void count(const files::TensorFile& file, const files::Tensor& tensor, int64_t first,
             int64_t count, Row* row) {
    internal::MagnitudeCounter counter(tensor.dtype);
    Outcome exact;
    const double stored_per_element =
        static_cast<double>(tensor.stored_bytes) / static_cast<double>(tensor.count);
    file.read(tensor, first, count, [&](const void* data, int64_t elements) {
      counter.add(data, elements);
      if (exact_) {
        exact += outcome_at(view(data, tensor.dtype, elements), out_->format, *out_->options.scale);
      }
      const auto bytes = static_cast<uint64_t>(stored_per_element * static_cast<double>(elements));
      bar_.show(read_ += bytes, bytes_);
    });
    const std::lock_guard lock(mutex_);
    counter.finish(&row->magnitudes);
    row->exact += exact;
  }

  Inspection* out_;
  uint64_t bytes_;  // of all files
  std::atomic<uint64_t> read_{0};
  ReadingBar bar_;
  bool exact_ = false;
  std::mutex mutex_;
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
    Scanner scanner(&inspection, bytes);
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
