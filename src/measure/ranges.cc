// RangeTable: the rows of all devices, and the kernel for the CPU.
#include "measure/ranges.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <string>

#include "core/check.h"
#include "core/float_environment.h"
#include "core/parallel.h"
#include "measure/cuda.h"
#include "measure/kernels.h"
#include "measure/scalar.h"

namespace headroom {
namespace internal {
namespace {

// The counts of one part of a tensor.
struct Part {
  Reached reached;
  RangeStats special;  // inf, nan and amax
};

template <typename T>
void count_special(const T* data, int64_t count, RangeStats* stats) {
  for (int64_t i = 0; i < count; ++i) {
    const T x = element(data + i);
    const auto magnitude = magnitude_of(x);
    if (magnitude < Element<T>::kInf) {
      stats->amax = std::max(stats->amax, widen(std::bit_cast<T>(magnitude)));
    } else if (magnitude > Element<T>::kInf) {
      ++stats->nan;
    } else {
      ++(std::bit_cast<typename Element<T>::Bits>(x) == magnitude ? stats->positive_inf
                                                                  : stats->negative_inf);
    }
  }
}

// Compares and adds integers only, which the compiler turns into vector instructions.
template <typename T>
void count_part(const T* data, int64_t count, Part* part) {
  using Bits = typename Element<T>::Bits;
  using Limits = Fp16Limits<T>;
  constexpr int64_t kBlock = 4096;  // counts of a block fit into 16 bits
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    Bits largest = 0, nonzero = 0, kept = 0, normal = 0, overflow = 0;
    for (int64_t i = 0; i < size; ++i) {
      const Bits magnitude = magnitude_of(element(data + begin + i));
      largest = std::max(largest, magnitude);
      nonzero = static_cast<Bits>(nonzero + (magnitude != 0));
      kept = static_cast<Bits>(kept + (magnitude >= Limits::kKept));
      normal = static_cast<Bits>(normal + (magnitude >= Limits::kNormal));
      overflow = static_cast<Bits>(overflow + (magnitude >= Limits::kOverflow));
    }
    part->reached.nonzero += nonzero;
    part->reached.kept += kept;
    part->reached.normal += normal;
    part->reached.overflow += overflow;
    if (largest < Element<T>::kInf) {
      part->special.amax = std::max(part->special.amax, widen(std::bit_cast<T>(largest)));
    } else {
      count_special(data + begin, size, &part->special);
    }
  }
}

RangeStats measure_on_cpu(const TensorView& tensor) {
  const DefaultFloatEnvironment environment;
  const int64_t parts_count = (tensor.count + kRangeElements - 1) / kRangeElements;
  std::vector<Part> parts(static_cast<size_t>(parts_count));
  parallel_for(parts.size(), tensor.bytes(), [&](size_t i) {
    const int64_t begin = static_cast<int64_t>(i) * kRangeElements;
    const int64_t size = std::min(kRangeElements, tensor.count - begin);
    with_type<f16, bf16, float, double>(tensor.dtype, [&](auto type) {
      count_part(static_cast<const decltype(type)*>(tensor.data) + begin, size, &parts[i]);
    });
  });
  Reached reached;
  RangeStats stats;
  for (const Part& part : parts) {
    reached.nonzero += part.reached.nonzero;
    reached.kept += part.reached.kept;
    reached.normal += part.reached.normal;
    reached.overflow += part.reached.overflow;
    stats.positive_inf += part.special.positive_inf;
    stats.negative_inf += part.special.negative_inf;
    stats.nan += part.special.nan;
    stats.amax = std::max(stats.amax, part.special.amax);
  }
  set_zones(tensor.count, reached, &stats);
  return stats;
}

}  // namespace

/// The state of a RangeTable.
class Ranges {
 public:
  explicit Ranges(int64_t rows_per_device) : room(rows_per_device) {}

  // A row and where its statistics are.
  struct Place {
    int device;    // -1 for the CPU
    int64_t slot;  // in that device's table
    int64_t count;
  };

  int64_t room;
  std::vector<Place> rows;
  std::vector<RangeStats> host;       // of tensors on the CPU
  std::map<int, CudaRanges> devices;  // by index
  std::map<int, int64_t> used;        // slots in each device's table
  bool finished = false;

  CudaRanges& on(int device) {
    return devices.try_emplace(device, device, static_cast<size_t>(room)).first->second;
  }
};

}  // namespace internal

bool fills_constants(const std::string& operation) {
  static const std::set<std::string> kNames = {
      "arange",        "as_tensor", "empty",      "empty_like",  "empty_strided", "fill",
      "fill_",         "full",      "full_like",  "masked_fill", "masked_fill_",  "new_empty",
      "new_full",      "new_ones",  "new_tensor", "new_zeros",   "ones",          "ones_like",
      "scalar_tensor", "tensor",    "tril",       "tril_",       "triu",          "triu_",
      "where",         "zero_",     "zeros",      "zeros_like"};
  return kNames.count(operation) > 0;
}

RangeTable::RangeTable(int64_t rows) {
  internal::check_value(rows > 0, "rows", static_cast<double>(rows), "above 0");
  impl_ = std::make_unique<internal::Ranges>(rows);
}
RangeTable::~RangeTable() = default;
RangeTable::RangeTable(RangeTable&&) noexcept = default;
RangeTable& RangeTable::operator=(RangeTable&&) noexcept = default;

void RangeTable::prepare(Device device, Stream stream) {
  const StreamScope scope(stream);
  if (device.type == DeviceType::kCUDA) impl_->on(device.index);
}

void RangeTable::begin(Stream stream) {
  const StreamScope scope(stream);
  impl_->rows.clear();
  impl_->host.clear();
  impl_->finished = false;
  for (auto& [device, table] : impl_->devices) {
    table.clear(static_cast<size_t>(impl_->used[device]));
  }
  impl_->used.clear();
}

int64_t RangeTable::measure(const TensorView& tensor, Stream stream) {
  internal::check_view(tensor, internal::Access::kRead, "The tensor");
  const StreamScope scope(stream);
  return internal::RangesAccess::measure(*this, tensor);
}

std::vector<int64_t> internal::RangesAccess::measure_all(RangeTable& table,
                                                         const std::vector<TensorView>& tensors) {
  Ranges& ranges = *table.impl_;
  std::vector<int64_t> rows;
  rows.reserve(tensors.size());
  std::map<int, std::vector<TensorView>> on_devices;
  for (const TensorView& tensor : tensors) {
    const bool cuda = tensor.device.type == DeviceType::kCUDA;
    const int device = cuda ? tensor.device.index : -1;
    int64_t& used = ranges.used[device];
    if (used == ranges.room) {
      rows.push_back(-1);
      continue;
    }
    if (cuda) {
      ranges.on(device);  // throws without CUDA, before there is a row
      on_devices[device].push_back(tensor);
    } else {
      ranges.host.push_back(measure_on_cpu(tensor));
    }
    rows.push_back(static_cast<int64_t>(ranges.rows.size()));
    ranges.rows.push_back({device, used++, tensor.count});
  }
  for (const auto& [device, list] : on_devices) {
    ranges.on(device).measure(list, static_cast<size_t>(ranges.used[device]) - list.size());
  }
  ranges.finished = false;
  return rows;
}

void RangeTable::finish(Stream stream) {
  const StreamScope scope(stream);
  for (auto& [device, table] : impl_->devices) {
    table.copy_to_host(static_cast<size_t>(impl_->used[device]));
  }
  impl_->finished = true;
}

bool RangeTable::ready() const {
  return impl_->finished && std::all_of(impl_->devices.begin(), impl_->devices.end(),
                                        [](const auto& entry) { return entry.second.ready(); });
}

std::vector<RangeStats> RangeTable::read() const {
  internal::require(impl_->finished, ErrorCode::kWrongOrder,
                    "RangeTable::read() was called before finish().");
  for (const auto& [device, table] : impl_->devices) table.wait();
  std::vector<RangeStats> all;
  all.reserve(impl_->rows.size());
  for (const auto& [device, slot, count] : impl_->rows) {
    all.push_back(device < 0 ? impl_->host[static_cast<size_t>(slot)]
                             : impl_->devices.at(device).read(static_cast<size_t>(slot), count));
  }
  return all;
}

}  // namespace headroom
