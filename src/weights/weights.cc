#include <headroom/weights.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <tuple>

#include "core/check.h"
#include "core/float_environment.h"
#include "files/pieces.h"
#include "files/tensor_file.h"
#include "inspect/cells.h"
#include "inspect/counter.h"
#include "inspect/numbers.h"
#include "record/text.h"
#include "weights/shards.h"

namespace headroom {
namespace {

using internal::grouped;
using internal::percent;
using internal::share;
using internal::three_digits;

constexpr size_t kNamesInVerdict = 5;

WeightTensor counts_of(const internal::Fates& fates, DType dtype, int64_t count) {
  const internal::DefaultFloatEnvironment environment;
  WeightTensor counts;
  counts.count = count;
  counts.zeros = fates.zeros;
  counts.infs = fates.infs;
  counts.nans = fates.nans;
  counts.fp16 = {fates.flushed, fates.subnormal, fates.overflow};
  if (counts.nonzero() == 0) return counts;
  counts.largest = internal::magnitude_value(dtype, fates.range.largest);
  counts.smallest = internal::magnitude_value(dtype, fates.range.smallest);
  return counts;
}

void add_counts(const WeightTensor& from, WeightTensor* to) {
  if (from.nonzero() > 0) {
    to->smallest = to->nonzero() > 0 ? std::min(to->smallest, from.smallest) : from.smallest;
    to->largest = std::max(to->largest, from.largest);
  }
  to->count += from.count;
  to->zeros += from.zeros;
  to->infs += from.infs;
  to->nans += from.nans;
  to->fp16 += from.fp16;
}

// PyTorch's own formats are often given the name of a safetensors file. They are not read, because
// unpickling runs code.
void refuse_other_formats(const files::File& file) {
  const std::string magic = file.read_text(0, std::min<uint64_t>(file.size(), 4));
  if (magic.starts_with("PK\x03\x04") || magic.starts_with("\x80\x02")) {
    file.refuse(
        "is not a safetensors file but an archive or a pickle, which could run code; load it in "
        "Python and pass the tensors to headroom.inspect(), or convert it to safetensors.");
  }
}

// A shard that lacks a tensor of its index is not the one that the checkpoint was saved with.
void check_promises(const files::File& file, const files::Contents& contents,
                    const std::vector<std::string>& promised) {
  std::set<std::string_view> names;
  for (const files::Tensor& tensor : contents.tensors) names.insert(tensor.name);
  for (const files::LeftOut& left : contents.left_out) names.insert(left.name);
  for (const std::string& name : promised) {
    if (!names.contains(name)) {
      file.refuse("does not hold " + files::in_quotes(name) + ", which its index promises.");
    }
  }
}

// One weight that becomes inf breaks every result computed from it; a few that become zero do not
// matter, because each was far smaller than the others.
bool damaged(const WeightTensor& tensor, double lose) {
  return tensor.fp16.overflow > 0 || share(tensor.fp16.flushed, tensor.nonzero()) > lose;
}

std::string quoted(const WeightTensor& tensor) { return internal::printable_line(tensor.name); }

std::string plural(int64_t count, const std::string& noun, const char* verb, const char* verbs) {
  return grouped(count) + " " + noun + (count == 1 ? " " : "s ") + (count == 1 ? verb : verbs);
}

// "a, b and 7 others".
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  const size_t shown = std::min(names.size(), kNamesInVerdict);
  for (size_t i = 0; i < shown; ++i) {
    text += (i == 0                  ? ""
             : i + 1 == names.size() ? " and "
                                     : ", ") +
            internal::printable_line(names[i]);
  }
  if (names.size() > shown) {
    const size_t more = names.size() - shown;
    text += " and " + std::to_string(more) + (more == 1 ? " other" : " others");
  }
  return text;
}

// The tensor that loses the largest share to zero; null if none loses any.
const WeightTensor* most_flushed(const WeightReport& report) {
  const WeightTensor* worst = nullptr;
  double most = 0.0;
  for (const WeightTensor& tensor : report.tensors) {
    const double lost = share(tensor.fp16.flushed, tensor.nonzero());
    if (lost > most) {
      most = lost;
      worst = &tensor;
    }
  }
  return worst;
}

template <typename Get>
const WeightTensor& tensor_with_most(const WeightReport& report, const Get& get) {
  return *std::max_element(
      report.tensors.begin(), report.tensors.end(),
      [&](const WeightTensor& a, const WeightTensor& b) { return get(a) < get(b); });
}

std::string flushed_text(const WeightTensor& tensor) {
  return percent(tensor.fp16.flushed, tensor.nonzero()) + " of the nonzero weights of " +
         quoted(tensor) + " become zero";
}

// The type of a tensor by the names of safetensors ("F8_E4M3", "U8") or of Python
// ("float8_e4m3fn", "uint8"). Unknown ones may be floating-point.
bool is_floating(const std::string& dtype) {
  const std::string kind = dtype.substr(0, dtype.find_first_of("0123456789"));
  return kind != "I" && kind != "U" && kind != "BOOL" && kind != "int" && kind != "uint" &&
         kind != "bool";
}

// The share of the weights that the verdict is about, of a report that is not complete.
std::string judged_sentence(const WeightReport& report) {
  int64_t all = report.total.count;
  const LeftOutWeights* first = nullptr;
  for (const LeftOutWeights& left : report.left_out) {
    if (!is_floating(left.dtype)) continue;
    all += left.count;
    if (first == nullptr) first = &left;
  }
  return "only " + grouped(report.total.count) + " of " + grouped(all) +
         " floating-point weights (" + percent(report.total.count, all) +
         ") were judged, because " + internal::printable_line(first->dtype) +
         " is not read, the type of " + internal::printable_line(first->name);
}

std::string safe_sentence(const WeightReport& report) {
  const WeightTensor* const worst = most_flushed(report);
  const std::string begin =
      report.complete ? "Safe in FP16: "
                      : "Not known to be safe in FP16: " + judged_sentence(report) + ". Of these ";
  if (report.total.nonzero() == 0) return begin + "all weights are zero.";
  return begin + "no weight overflows (the largest is " + three_digits(report.total.largest) +
         ", FP16 ends at 65504), and " +
         (worst == nullptr ? "none becomes zero." : "no more than " + flushed_text(*worst) + ".");
}

std::string unsafe_sentence(const WeightReport& report) {
  std::vector<std::string> reasons;
  const WeightTensor& total = report.total;
  if (total.fp16.overflow > 0) {
    const WeightTensor& top =
        tensor_with_most(report, [](const WeightTensor& tensor) { return tensor.largest; });
    reasons.push_back(plural(total.fp16.overflow, "weight", "overflows", "overflow") +
                      " (the largest is " + three_digits(top.largest) + " in " + quoted(top) +
                      ", FP16 ends at 65504)");
  }
  const WeightTensor* const worst = most_flushed(report);
  if (worst != nullptr && share(worst->fp16.flushed, worst->nonzero()) > report.lose) {
    reasons.push_back(flushed_text(*worst));
  }
  if (total.infs + total.nans > 0) {
    const auto& bad =
        *std::find_if(report.tensors.begin(), report.tensors.end(),
                      [](const WeightTensor& tensor) { return tensor.infs + tensor.nans > 0; });
    reasons.push_back("the checkpoint itself has " + grouped(total.infs) + " inf and " +
                      grouped(total.nans) + " nan, first in " + quoted(bad) +
                      ", which no format cures");
  }
  if (!report.complete) reasons.push_back(judged_sentence(report));
  std::string sentence = "Unsafe in FP16: ";
  for (size_t i = 0; i < reasons.size(); ++i) sentence += (i == 0 ? "" : "; ") + reasons[i];
  if (report.keep_fp32.empty()) return sentence + ".";
  return sentence + ". Keep in FP32: " + listed(report.keep_fp32) + ".";
}

// By overflows, then by the shares that become zero and subnormal.
std::vector<size_t> order_of(const std::vector<WeightTensor>& tensors) {
  std::vector<std::tuple<int64_t, double, double, size_t>> keys;  // negated: sorted ascending
  for (size_t i = 0; i < tensors.size(); ++i) {
    const WeightTensor& tensor = tensors[i];
    keys.emplace_back(-(tensor.fp16.overflow + tensor.infs + tensor.nans),
                      -share(tensor.fp16.flushed, tensor.nonzero()),
                      -share(tensor.fp16.subnormal, tensor.nonzero()), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<size_t> order;
  for (const auto& key : keys) order.push_back(std::get<3>(key));
  return order;
}

}  // namespace

struct WeightInspector::Collected {
  WeightReport report;

  void read(const internal::Shard& shard, const std::function<void(uint64_t)>& progress) {
    const files::File file(shard.path);
    refuse_other_formats(file);
    const files::Contents contents = files::read_safetensors(file, {});
    check_promises(file, contents, shard.promised);
    for (const files::LeftOut& left : contents.left_out) {
      report.left_out.push_back({shard.path, left.name, left.dtype, left.count});
    }
    const size_t first_row = report.tensors.size();
    std::vector<const files::Tensor*> tensors;
    for (const files::Tensor& tensor : contents.tensors) {
      tensors.push_back(&tensor);
      WeightTensor& row = report.tensors.emplace_back();
      row.file = shard.path;
      row.name = tensor.name;
      row.dtype = tensor.dtype;
      row.shape = tensor.shape;
    }
    std::mutex mutex;
    files::for_each_piece(tensors, [&](size_t i, int64_t first, int64_t count) {
      const DType dtype = tensors[i]->dtype;
      const internal::BitLimits limits = internal::bit_limits(dtype, Format::kFP16, 1.0);
      internal::Fates fates;
      files::read_plain(file, *tensors[i], first, count, [&](const void* data, int64_t elements) {
        internal::count_fates(data, elements, dtype, limits, &fates);
        progress(static_cast<uint64_t>(elements) * size_of(dtype));
      });
      const std::lock_guard lock(mutex);
      add_counts(counts_of(fates, dtype, count), &report.tensors[first_row + i]);
    });
  }
};

WeightInspector::WeightInspector(double lose) : collected_(std::make_unique<Collected>()) {
  internal::require(lose >= 0.0 && lose <= 1.0, ErrorCode::kInvalidArgument, [&] {
    return "The share of weights that may be lost is " + internal::number(lose) +
           "; pass one from 0 to 1.";
  });
  collected_->report.lose = lose;
}

WeightInspector::~WeightInspector() = default;

void WeightInspector::add(const std::string& name, const TensorView& weights,
                          std::vector<int64_t> shape) {
  const internal::Fates fates = internal::fates_of(weights, Format::kFP16, 1.0);
  WeightTensor& row = collected_->report.tensors.emplace_back();
  row.name = name;
  row.dtype = weights.dtype;
  row.shape = std::move(shape);
  add_counts(counts_of(fates, weights.dtype, weights.count), &row);
}

void WeightInspector::leave_out(const std::string& name, const std::string& dtype, int64_t count) {
  collected_->report.left_out.push_back({"", name, dtype, count});
}

void WeightInspector::add_files(
    const std::vector<std::string>& paths,
    const std::function<void(uint64_t done, uint64_t total)>& progress) {
  std::vector<internal::Shard> shards;
  std::map<std::filesystem::path, size_t> indices;  // by the path without links
  for (const std::string& path : paths) {
    for (internal::Shard& shard : internal::shards_of(path)) {
      std::error_code error;  // the path as it is then; opening it gives the reason
      const auto [known, is_new] =
          indices.emplace(std::filesystem::weakly_canonical(shard.path, error), shards.size());
      if (is_new) {
        shards.push_back(std::move(shard));
      } else {
        std::move(shard.promised.begin(), shard.promised.end(),
                  std::back_inserter(shards[known->second].promised));
      }
    }
  }
  uint64_t total = 0;
  for (const internal::Shard& shard : shards) total += files::File(shard.path).size();
  std::atomic<uint64_t> done{0};
  for (const internal::Shard& shard : shards) {
    collected_->read(shard, [&](uint64_t bytes) {
      const uint64_t now = done += bytes;
      if (progress) progress(now, total);
    });
  }
}

WeightReport WeightInspector::finish() {
  WeightReport report = std::move(collected_->report);
  collected_->report = {};
  collected_->report.lose = report.lose;
  internal::require(!report.tensors.empty(), ErrorCode::kInvalidArgument, [&] {
    return report.left_out.empty()
               ? std::string("There are no weights to inspect.")
               : "There are no weights of f16, bf16, f32 or f64 to inspect; " +
                     files::in_quotes(report.left_out.front().name) + " is of type " +
                     files::in_quotes(report.left_out.front().dtype) + ".";
  });
  report.total.name = "total";
  for (const WeightTensor& tensor : report.tensors) add_counts(tensor, &report.total);
  report.worst_first = order_of(report.tensors);
  for (const size_t i : report.worst_first) {
    if (damaged(report.tensors[i], report.lose)) report.keep_fp32.push_back(report.tensors[i].name);
  }
  report.complete =
      std::none_of(report.left_out.begin(), report.left_out.end(),
                   [](const LeftOutWeights& left) { return is_floating(left.dtype); });
  const bool fits = report.keep_fp32.empty() && report.total.infs + report.total.nans == 0;
  report.safe = fits && report.complete;
  report.verdict = fits ? safe_sentence(report) : unsafe_sentence(report);
  return report;
}

}  // namespace headroom
