// Watch: LibTorch calls back before and after every operation (at::RecordFunction), in the thread
// of the program and in those of backward.
#include <ATen/record_function.h>
#include <headroom/error.h>
#include <headroom/libtorch/watch.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "measure/ranges.h"
#include "tensors.h"

namespace headroom::libtorch {
namespace {

// Of this thread: the modules and the nodes of backward that are running, how many operations are
// inside of each other, and whether the watch itself calls operations.
thread_local std::vector<std::string> scopes;
thread_local std::vector<int64_t> nodes;
thread_local int depth = 0;
thread_local bool busy = false;

struct BusyScope {
  BusyScope() { busy = true; }
  ~BusyScope() { busy = false; }
};

// The Watch between begin() and finish(); null if there is none. Threads of backward read it.
std::atomic<Watch::Impl*> active{nullptr};

// The tensor, or a copy of it in dense memory, which is no operation of the program.
torch::Tensor dense_values(const torch::Tensor& tensor) {
  const BusyScope scope;
  return internal::is_dense(tensor) ? tensor : tensor.detach().contiguous();
}

bool is_measurable(const torch::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return (type == torch::kHalf || type == torch::kBFloat16 || type == torch::kFloat ||
          type == torch::kDouble) &&
         tensor.layout() == torch::kStrided && (tensor.is_cpu() || tensor.is_cuda()) &&
         tensor.has_storage() && (tensor.numel() == 0 || tensor.data_ptr() != nullptr);
}

template <typename Values, typename Visit>
void for_tensors(const Values& values, const Visit& visit) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const torch::Tensor& tensor : value.toTensorVector()) visit(tensor);
    }
  }
}

std::string operation_name(const at::RecordFunction& function) {
  const std::string name = function.name();
  return name.rfind("aten::", 0) == 0 ? name.substr(6) : name;
}

}  // namespace

struct Watch::Impl {
  // An operation from start() to end().
  struct Started : at::ObserverContext {
    bool node = false;   // of backward
    bool inner = false;  // inside of another operation, whose result is not complete yet
    int depth_outside = 0;
    std::vector<int64_t> inputs;                                        // rows
    std::vector<std::pair<const c10::StorageImpl*, int64_t>> storages;  // of the inputs, with rows
  };

  // The row of a tensor. The weak reference keeps the tensor's address from being used again.
  struct TensorRow {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    int64_t row;
  };

  std::mutex mutex;
  RangeTable table;
  std::vector<RangeRow> rows;
  std::unordered_map<const c10::TensorImpl*, TensorRow> row_by_tensor;
  std::unordered_map<const c10::TensorImpl*, std::string> parameters;
  std::map<int64_t, std::pair<std::string, std::string>> operations;  // by sequence number
  bool backward_began = false;
  at::CallbackHandle callback = 0;

  int64_t row_of(const torch::Tensor& tensor) const {
    const auto found = row_by_tensor.find(tensor.unsafeGetTensorImpl());
    return found == row_by_tensor.end() ? -1 : found->second.row;
  }

  void set_row(const torch::Tensor& tensor, int64_t row) {
    row_by_tensor.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        TensorRow{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), row});
  }

  // Measures a tensor into a new row; returns -1 if it cannot be measured.
  int64_t measure(const torch::Tensor& tensor, RangeRow row) {
    if (!is_measurable(tensor)) return -1;
    const internal::TorchStream stream;
    const torch::Tensor dense = dense_values(tensor);
    const TensorView view = view_of(dense, "The result");
    row.dtype = view.dtype;
    const int64_t index = headroom::internal::RangesAccess::measure(table, view);
    if (index >= 0) {
      rows.push_back(std::move(row));
      set_row(tensor, index);
    }
    return index;
  }

  // The row of an input, which is measured now if no watched operation has computed it.
  int64_t input_row(const torch::Tensor& tensor) {
    const int64_t known_row = row_of(tensor);
    if (known_row >= 0) return known_row;
    RangeRow row;
    const auto parameter = parameters.find(tensor.unsafeGetTensorImpl());
    row.source = parameter != parameters.end() ? RangeSource::kParameter : RangeSource::kInput;
    row.tensor = "from outside";
    if (parameter != parameters.end()) {
      const size_t dot = parameter->second.rfind('.');
      if (dot != std::string::npos) row.module = parameter->second.substr(0, dot);
      row.tensor = parameter->second.substr(dot == std::string::npos ? 0 : dot + 1);
    }
    return measure(tensor, std::move(row));
  }

  // The module and name under which results of this operation are reported.
  RangeRow describe(const at::RecordFunction& function) {
    RangeRow row;
    row.operation = operation_name(function);
    if (!backward_began) {
      if (!scopes.empty()) row.module = scopes.back();
      if (fills_constants(row.operation)) row.source = RangeSource::kConstant;
      if (function.seqNr() >= 0) operations[function.seqNr()] = {row.module, row.operation};
      return row;
    }
    row.direction = RangeDirection::kBackward;
    // An operation may have several nodes, with the sequence numbers from its own one on.
    const auto next = operations.upper_bound(nodes.empty() ? -1 : nodes.back());
    if (next != operations.begin()) std::tie(row.module, row.operation) = std::prev(next)->second;
    return row;
  }

  std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    auto started = std::make_unique<Started>();
    const std::lock_guard lock(mutex);
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      backward_began = true;
      started->node = true;
      nodes.push_back(function.seqNr());
      started->depth_outside = std::exchange(depth, 0);  // backward() itself is an operation, too
      return started;
    }
    started->inner = depth > 0;
    if (!started->inner) {
      for_tensors(function.inputs(), [&](const torch::Tensor& tensor) {
        const int64_t row = input_row(tensor);
        if (row < 0) return;
        started->inputs.push_back(row);
        started->storages.emplace_back(tensor.storage().unsafeGetStorageImpl(), row);
      });
    }
    ++depth;  // only now: torch does not call end() if this throws
    return started;
  }

  void end(const at::RecordFunction& function, const Started& started) {
    const std::lock_guard lock(mutex);
    if (started.node) {
      depth = started.depth_outside;
      return nodes.pop_back();
    }
    --depth;
    if (started.inner) return;
    const RangeRow row = describe(function);
    const bool in_place = row.operation.back() == '_' || std::string(function.name()).back() == '_';
    for_tensors(function.outputs(), [&](const torch::Tensor& tensor) {
      if (!is_measurable(tensor)) return;
      if (!in_place) {
        if (row_of(tensor) >= 0) return;                          // one of the inputs
        for (const auto& [storage, shared] : started.storages) {  // a view
          if (storage == tensor.storage().unsafeGetStorageImpl()) return set_row(tensor, shared);
        }
      }
      RangeRow made = row;
      made.inputs = started.inputs;
      measure(tensor, std::move(made));
    });
  }

  void stop() {
    if (callback == 0) return;
    at::removeCallback(callback);
    callback = 0;
    active = nullptr;
    row_by_tensor.clear();
    operations.clear();
  }
};

Watch::Watch(const torch::nn::Module& model) : impl_(std::make_unique<Impl>()) {
  const internal::TorchStream stream;
  for (const auto& item : model.named_parameters()) {
    impl_->parameters[item.value().unsafeGetTensorImpl()] = item.key();
    if (item.value().is_cuda()) {
      impl_->table.prepare(
          internal::core_device(item.value().device(), internal::current_cuda_device()));
    }
  }
}

Watch::~Watch() { impl_->stop(); }

void Watch::begin() {
  impl_->stop();
  Impl* nobody = nullptr;
  if (!active.compare_exchange_strong(nobody, impl_.get())) {
    throw Error(ErrorCode::kWrongOrder, "Another Watch is watching a step; finish() it first.");
  }
  const internal::TorchStream stream;
  impl_->rows.clear();
  impl_->backward_began = false;
  nodes.clear();
  depth = 0;
  try {
    impl_->table.begin();
  } catch (...) {
    active = nullptr;
    throw;
  }
  at::RecordFunctionCallback callback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        Impl* const watching = active;
        return watching == nullptr || busy ? nullptr : watching->start(function);
      },
      [](const at::RecordFunction& function, at::ObserverContext* context) {
        Impl* const watching = active;
        if (watching != nullptr && context != nullptr) {
          watching->end(function, *static_cast<Impl::Started*>(context));
        }
      });
  callback.needsInputs(true).needsOutputs(true).scopes(
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
  impl_->callback = at::addThreadLocalCallback(callback);
}

void Watch::finish() {
  if (impl_->callback == 0) return;
  impl_->stop();
  const internal::TorchStream stream;
  impl_->table.finish();
}

bool Watch::ready() const { return impl_->table.ready(); }

std::vector<RangeRow> Watch::rows() const {
  std::vector<RangeRow> rows = impl_->rows;
  const std::vector<RangeStats> stats = impl_->table.read();
  for (size_t i = 0; i < rows.size(); ++i) rows[i].stats = stats[i];
  return rows;
}

WatchScope::WatchScope(std::string module) { scopes.push_back(std::move(module)); }
WatchScope::~WatchScope() { scopes.pop_back(); }

}  // namespace headroom::libtorch
