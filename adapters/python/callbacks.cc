// Optimizers and ranks that are implemented in Python: the core calls back into the interpreter.
// The core runs without the interpreter lock; every callback takes it. An exception that a callback
// raises travels through the core like any other error and reaches the caller in Python.
#include <headroom/agree.h>
#include <headroom/optimizer.h>

#include <utility>

#include "tensors.h"

namespace headroom::python {
namespace {

/// The base of Python classes that put a framework's optimizer under a GradScaler: the virtual
/// methods of headroom::Optimizer.
class CallbackOptimizer : public Optimizer {
 public:
  CallbackOptimizer() : Optimizer({}) {}
  /// The Python object that owns this one.
  void set_self(py::handle self) { self_ = self; }

  void apply(float multiplier, bool clear_grads) override {
    call("apply", multiplier, clear_grads);
  }
  bool apply_on_device(const DeviceVerdict* verdict, bool clear_grads, void* stream) override {
    return call("apply_on_device", reinterpret_cast<uintptr_t>(verdict), clear_grads,
                reinterpret_cast<uintptr_t>(stream));
  }
  void refresh() override { call("refresh"); }
  void gradients_changed() override { call("gradients_changed"); }
  bool overflows(float multiplier) const override { return call("overflows", multiplier); }

 private:
  template <typename... Args>
  bool call(const char* method, const Args&... args) const {
    const py::gil_scoped_acquire lock;
    if (PyObject_HasAttrString(self_.ptr(), method) == 0) return false;
    const py::object result = self_.attr(method)(args...);
    return !result.is_none() && result.cast<bool>();
  }

  py::handle self_;
};

/// Ranks over whatever Python communicates with. `reduce` gets two memoryviews of doubles,
/// `enqueue` the addresses and counts on the CUDA device and the stream.
class CallbackRanks : public Ranks {
 public:
  CallbackRanks(int rank, int size, py::object reduce, py::object enqueue)
      : rank_(rank), size_(size), reduce_(std::move(reduce)), enqueue_(std::move(enqueue)) {}
  ~CallbackRanks() override {
    const py::gil_scoped_acquire lock;
    reduce_ = {};
    enqueue_ = {};
  }
  CallbackRanks(const CallbackRanks&) = delete;
  CallbackRanks& operator=(const CallbackRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) override {
    const py::gil_scoped_acquire lock;
    reduce_(view(sums, sum_count), view(maxima, maximum_count));
  }
  bool enqueues() const override {
    const py::gil_scoped_acquire lock;
    return !enqueue_.is_none();
  }
  void enqueue(double* sums, size_t sum_count, double* maxima, size_t maximum_count,
               void* stream) override {
    const py::gil_scoped_acquire lock;
    enqueue_(reinterpret_cast<uintptr_t>(sums), sum_count, reinterpret_cast<uintptr_t>(maxima),
             maximum_count, reinterpret_cast<uintptr_t>(stream));
  }

 private:
  // A memoryview of doubles.
  static py::object view(double* numbers, size_t count) {
    constexpr int kWritable = 0x200;  // PyBUF_WRITE, which the limited API has from 3.11 on only
    const auto bytes = py::object::steal(
        PyMemoryView_FromMemory(reinterpret_cast<char*>(numbers),
                                static_cast<Py_ssize_t>(count * sizeof(double)), kWritable));
    return bytes.attr("cast")("d");
  }

  int rank_;
  int size_;
  py::object reduce_;
  py::object enqueue_;
};

// The framework's current stream on a device. Never destroyed: the interpreter may end first.
py::object& stream_getter() {
  static auto* const getter = new py::object(py::none());
  return *getter;
}

void* current_stream(int device) {
  const py::gil_scoped_acquire lock;
  if (stream_getter().is_none()) return nullptr;
  return reinterpret_cast<void*>(stream_getter()(device).cast<uintptr_t>());
}

}  // namespace

Stream stream_from(uintptr_t stream) {
  return stream == kCurrentStreams ? Stream(&current_stream)
                                   : Stream(reinterpret_cast<void*>(stream));
}

void bind_callbacks(py::module_& m) {
  m.add("CURRENT_STREAMS", kCurrentStreams);
  m.def("set_stream_getter", [](py::object getter) { stream_getter() = std::move(getter); });
  py::class_<CallbackOptimizer, Optimizer>(m, "CallbackOptimizer").def_constructor<>();
  py::class_<Ranks>(m, "Ranks").def_property_readonly("enqueues", py::fn<&Ranks::enqueues>);
  py::class_<CallbackRanks, Ranks>(m, "CallbackRanks")
      .def_constructor<int, int, py::object, py::object>(
          py::arg("rank"), py::arg("size"), py::arg("reduce"), py::arg("enqueue") = py::none());
}

}  // namespace headroom::python
