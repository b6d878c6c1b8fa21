// RangeTrace follows one forward and backward pass of torch operation by operation, and measures
// every result and gradient into a RangeTable. It runs for every operation of a watched step, so it
// must be fast. headroom/torch/_trace.py decides what it sees.
#include <headroom/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/access.h"
#include "calls.h"
#include "measure/ranges.h"
#include "reader.h"
#include "tensors.h"
#include "traced_pass.h"

namespace headroom::python {
namespace {

// What the trace has to know about torch and the model.
struct TraceSetup {
  py::object reader;  // a TensorReader; None before torch 2.10
  py::tuple dtypes;   // torch's, in the order of DType
  py::type tensor_type;
  py::type parameter_type;
  py::object measure;   // called with a table and a tensor that `reader` cannot read
  py::list modules;     // (name, module) of those that are running, outermost first
  py::dict owners;      // id of a parameter or buffer: (module, its name there)
  bool shards = false;  // processes share parameters or gradients: their memory changes in a step
};

class RangeTrace : public std::enable_shared_from_this<RangeTrace> {
 public:
  RangeTrace(py::object table, TraceSetup setup)
      : owner_(std::move(table)),
        table_(&owner_.cast<RangeTable&>()),
        reader_(setup.reader.is_none() ? nullptr : &setup.reader.cast<TensorReader&>()),
        setup_(std::move(setup)) {}

  // Names tensors that the model is called with.
  void name_inputs(py::handle named) {
    py::for_each_in(named, [this](py::handle item) {
      const auto pair = item.cast<py::tuple>();
      inputs_[pair[1].ptr()] = py::string_from(pair[0]);
    });
  }

  // Follows a call of the torch API that has returned `result`. `kwargs` may be None.
  void follow(py::handle function, const py::tuple& args, py::handle kwargs, py::handle result) {
    if (!is_tensor(result) && !is_sequence(result) && !result.is_none()) return;
    const auto& [kind, name] = call_of(function);
    if (kind == CallKind::kIgnore) return;
    const auto results = measurable(kind == CallKind::kSet ? args[0] : result);
    if (results.empty()) return;
    if (shares(kind, args, results[0])) {
      const Index op = op_of(args[0]);
      if (op >= 0) {
        for (const py::handle tensor : results) mark(tensor, op);
        return;
      }
    }
    Op op{module_now(), name, "",
          kind == CallKind::kFill ? RangeSource::kConstant : RangeSource::kOperation};
    const auto add = [&](py::handle value) {
      if (!was_overwritten(value, results)) add_input(value, &op.inputs);
    };
    py::for_each_item(args, add);
    if (!kwargs.is_none()) {
      kwargs.cast<py::dict>().for_each([&](py::handle, py::handle value) { add(value); });
    }
    const bool filled = kind == CallKind::kFill && op.inputs.empty();
    for (const py::handle tensor : results) {
      const Index index = pass_.add(op);
      mark(tensor, index);
      if (!filled) measure_op(tensor, index);
    }
  }

  // Parameters, and gradients that become `parameter.grad`, are measured by stop(), when the host
  // has time. Others are measured now, and their gradients when backward brings them: those that
  // are added to `parameter.grad`, or leave it at once.
  void end_forward() {
    static const py::Attribute kGrad("grad");
    std::vector<std::pair<Index, py::object>> now;
    for (auto& [op, parameter] : parameters_) {
      const py::object hooks = parameter.attr("_post_accumulate_grad_hooks", py::none());
      if (kGrad.of(parameter).is_none() && PyObject_IsTrue(hooks.ptr()) != 1) {
        awaited_.emplace_back(op, std::move(parameter));
        continue;
      }
      if (parameter.attr("requires_grad").cast<bool>()) hook_leaf(parameter, op);
      now.emplace_back(pass_.op(op).place, std::move(parameter));
    }
    parameters_.clear();
    measure_together(now);
  }

  // Measures gradients of parameters, and nothing more. The rows remain.
  void stop() {
    end_forward();
    measure_awaited();
    active_ = false;
    py::for_each_item(leaf_hooks_, [](py::handle hook) { hook.attr("remove")(); });
    for (const auto& reference : marked_) {  // a program may pickle its tensors
      const py::object tensor = reference();
      if (!tensor.is_none()) mark_attribute().erase_own(tensor);
    }
    leaf_hooks_ = py::list();
    marked_.clear();
    kept_.clear();
    known_.clear();
    inputs_.clear();
  }

  // Takes the statistics from the table, waiting for its device.
  void read() {
    const py::gil_scoped_release release;
    stats_ = table_->read();
  }

  RangeReport report() const { return pass_.report(stats_); }
  int64_t unmeasured() const { return pass_.unmeasured(); }

 private:
  using Index = TracedPass::Index;
  using Op = TracedPass::Op;

  // What a hook of autograd is called with: PyCFunction's `self`.
  struct Hook {
    std::shared_ptr<RangeTrace> trace;
    Index op;
    Py_ssize_t output;  // of the node
  };

  static const py::Attribute& mark_attribute() {
    static const py::Attribute kMark("_headroom_op");
    return kMark;
  }

  static int64_t next_id(int64_t count) {  // no two operations have the same, of whatever trace
    static int64_t next = 1;
    return std::exchange(next, next + count);
  }

  bool is_tensor(py::handle value) const {
    return PyObject_TypeCheck(value.ptr(),
                              reinterpret_cast<PyTypeObject*>(setup_.tensor_type.ptr())) != 0;
  }

  bool is_parameter(py::handle tensor) const {  // torch counts tensors with _is_param, too
    const int found = PyObject_IsInstance(tensor.ptr(), setup_.parameter_type.ptr());
    py::check(found);
    return found != 0;
  }

  static bool is_sequence(py::handle value) {
    return PyTuple_Check(value.ptr()) || PyList_Check(value.ptr());
  }

  std::optional<DType> dtype_of(py::handle tensor) const {
    static const py::Attribute kDtype("dtype");
    const py::object dtype = kDtype.of(tensor);
    for (size_t i = 0; i < setup_.dtypes.size(); ++i) {
      if (dtype.is(setup_.dtypes[i])) return static_cast<DType>(i);
    }
    return std::nullopt;
  }

  // The tensors of a result whose type can be measured.
  std::vector<py::handle> measurable(py::handle result) const {
    std::vector<py::handle> tensors;
    const auto add = [&](py::handle value) {
      if (is_tensor(value) && dtype_of(value).has_value()) tensors.push_back(value);
    };
    if (is_sequence(result)) {
      py::for_each_item(result, add);
    } else {
      add(result);
    }
    return tensors;
  }

  // Whether no element of the result can be larger than the largest of the first argument, or 1.
  bool shares(CallKind kind, const py::tuple& args, py::handle result) const {
    if (args.size() == 0) return false;
    if (kind == CallKind::kShare) return true;
    if (kind == CallKind::kCast) {  // to a type with at least the same range
      const auto size = [](py::handle tensor) {
        return tensor.attr("element_size")().cast<int64_t>();
      };
      if (!is_tensor(args[0])) return false;
      return args[0].attr("dtype").is(result.attr("dtype")) ||
             (size(result) > 2 && size(args[0]) <= size(result));
    }
    if (kind != CallKind::kProduct && kind != CallKind::kQuotient) return false;
    if (args.size() != 2) return false;
    PyObject* const factor = args[1].ptr();
    if (!PyFloat_Check(factor) && !PyLong_Check(factor)) return false;
    const double size = std::fabs(PyFloat_AsDouble(factor));
    if (PyErr_Occurred() != nullptr) {  // an int beyond all doubles
      PyErr_Clear();
      return false;
    }
    return kind == CallKind::kProduct ? size <= 1 : size >= 1;
  }

  // Whether the operation has written to this argument before its values were measured.
  bool was_overwritten(py::handle value, const std::vector<py::handle>& results) const {
    const auto same = [&](py::handle result) { return result.is(value); };
    if (std::none_of(results.begin(), results.end(), same)) return false;
    const Index op = known(value);
    return op < 0 || (pass_.op(op).place < 0 && pass_.op(op).source != RangeSource::kOperation);
  }

  void add_input(py::handle value, std::vector<Index>* inputs) {
    if (is_tensor(value)) {
      const Index op = op_of(value);
      if (op >= 0) inputs->push_back(op);
    } else if (is_sequence(value)) {
      py::for_each_item(value, [&](py::handle item) {
        if (is_tensor(item)) add_input(item, inputs);
      });
    }
  }

  // The operation that computed a tensor; -1 if its type cannot be measured. Others are measured
  // when they are first used: parameters, inputs, and results of autograd functions, which the
  // trace does not see.
  Index op_of(py::handle tensor) {
    Index op = known(tensor);
    if (op < 0) {
      if (!is_tensor(tensor) || !dtype_of(tensor).has_value()) return -1;
      op = add_source(tensor);
    }
    const Op& made = pass_.op(op);
    if (made.place < 0 && made.source != RangeSource::kOperation) measure_op(tensor, op);
    return op;
  }

  // The operation or source of a tensor that was seen before; -1 for others.
  Index known(py::handle tensor) const {
    const Index op = marked(tensor);
    if (op >= 0) return op;
    const auto found = known_.find(tensor.ptr());
    return found != known_.end() ? found->second : -1;
  }

  Index add_source(py::handle tensor) {
    const py::object node = grad_fn(tensor);
    if (!node.is_none()) {
      auto name = node.attr("name")().cast<std::string>();
      if (name.ends_with("Backward")) name.resize(name.size() - 8);
      const Index op = pass_.add({module_now(), std::move(name), ""});
      mark(tensor, op);
      measure_op(tensor, op);
      return op;
    }
    Op op;
    const auto [owner, name] = owner_of(tensor);
    if (name.empty()) {
      const auto input = inputs_.find(tensor.ptr());
      op = {module_now(), "", input == inputs_.end() ? "from outside" : input->second,
            RangeSource::kInput};
    } else if (is_parameter(tensor)) {
      op = {owner, "", name, RangeSource::kParameter};
    } else {
      op = {owner, "buffer " + name, name, RangeSource::kConstant};
    }
    const Index index = pass_.add(std::move(op));
    known_[tensor.ptr()] = index;
    kept_.push_back(py::object::borrow(tensor));  // keeps the address in use
    return index;
  }

  // The module that a parameter or buffer belongs to, and its name there; empty for other tensors.
  // Looks into the running module as well: FSDP's parameters are others outside of forward.
  std::pair<std::string, std::string> owner_of(py::handle tensor) const {
    if (inputs_.count(tensor.ptr()) > 0) return {};
    const py::object id = py::object::steal(PyLong_FromVoidPtr(tensor.ptr()));
    const py::handle found = PyDict_GetItemWithError(setup_.owners.ptr(), id.ptr());
    if (found) return found.cast<std::pair<std::string, std::string>>();
    std::pair<std::string, std::string> owner;
    if (setup_.modules.size() == 0) return owner;
    const auto running = setup_.modules[setup_.modules.size() - 1].cast<py::tuple>();
    for (const char* const attribute : {"_parameters", "_buffers"}) {
      py::object values = running[1].attr(attribute);
      if (PyDict_Check(values.ptr()) == 0) {  // of torch.jit
        values = py::handle(reinterpret_cast<PyObject*>(&PyDict_Type))(values);
      }
      py::dict(values).for_each([&](py::handle key, py::handle value) {
        if (value.is(tensor) && owner.second.empty()) {
          owner = {py::string_from(running[0]), py::string_from(key)};
        }
      });
      if (!owner.second.empty()) break;
    }
    return owner;
  }

  // Modules that the model does not list belong to their caller.
  std::string module_now() const {
    const size_t depth = setup_.modules.size();
    if (depth == 0) return {};
    return py::string_from(PyTuple_GetItem(setup_.modules[depth - 1].ptr(), 0));
  }

  void mark(py::handle tensor, Index op) {
    if (Py_IS_TYPE(tensor.ptr(),  // which outlives the trace
                   reinterpret_cast<PyTypeObject*>(setup_.parameter_type.ptr()))) {
      return;
    }
    mark_attribute().set_own(tensor, py::object::steal(PyLong_FromLongLong(first_id_ + op)));
    marked_.push_back(py::object::steal(PyWeakref_NewRef(tensor.ptr(), nullptr)));
  }

  // The operation that a tensor is marked with; -1 if this trace has not marked it.
  Index marked(py::handle tensor) const {
    const py::handle mark = mark_attribute().own(tensor);
    if (!mark) return -1;
    const int64_t op = PyLong_AsLongLong(mark.ptr()) - first_id_;
    return op >= 0 && op < pass_.op_count() ? static_cast<Index>(op) : -1;
  }

  static py::object grad_fn(py::handle tensor) {
    static const py::Attribute kGradFn("grad_fn");
    return kGradFn.of(tensor);
  }

  // Measures a result now and its gradient when backward brings it. Parameters stay as they are
  // until backward is done, and are measured then, together.
  void measure_op(py::handle tensor, Index op) {
    static const py::Attribute kOutput("output_nr"), kRequiresGrad("requires_grad");
    static const py::handle kRegister = PyUnicode_InternFromString("register_prehook");
    if (pass_.op(op).source == RangeSource::kParameter && !setup_.shards) {
      add_place(tensor, op, false, TracedPass::kUnreadable);
      parameters_.emplace_back(op, py::object::borrow(tensor));
      return;
    }
    measure(tensor, op, false);
    const py::object node = grad_fn(tensor);
    if (!node.is_none()) {  // a hook of the node takes a tenth of the time of one of the tensor
      const py::object gradients = hook(op, kOutput.of(tensor).cast<Py_ssize_t>());
      py::object::steal(
          PyObject_CallMethodObjArgs(node.ptr(), kRegister.ptr(), gradients.ptr(), nullptr));
    } else if (kRequiresGrad.of(tensor).is(Py_True)) {
      hook_leaf(tensor, op);
    }
  }

  // The hooks of a leaf outlive the graph: stop() removes this one.
  void hook_leaf(py::handle leaf, Index op) {
    leaf_hooks_.append(leaf.attr("register_hook")(hook(op, 0)));
  }

  // A Python function that measures the gradient of an operation's result.
  py::object hook(Index op, Py_ssize_t output) {
    static PyMethodDef method = {"measure_gradient", &RangeTrace::on_gradients, METH_O, nullptr};
    const py::capsule context(new Hook{shared_from_this(), op, output}, nullptr, [](PyObject* of) {
      delete static_cast<Hook*>(PyCapsule_GetPointer(of, nullptr));
    });
    return py::object::steal(PyCFunction_NewEx(&method, context.ptr(), nullptr));
  }

  // Nodes pass a tuple, leaves a tensor. None leaves the gradient as it is.
  static PyObject* on_gradients(PyObject* self, PyObject* gradients) {
    try {
      const auto* const hook = static_cast<const Hook*>(PyCapsule_GetPointer(self, nullptr));
      const py::handle gradient =
          PyTuple_Check(gradients) ? PyTuple_GetItem(gradients, hook->output) : gradients;
      if (!gradient) throw py::error_already_set();
      RangeTrace& trace = *hook->trace;
      if (trace.active_ && !gradient.is_none()) {
        trace.measure(gradient, hook->op, true);
      }
      Py_RETURN_NONE;
    } catch (...) {
      py::raise_current_exception();
    }
    return nullptr;
  }

  // Adds the next place in program order.
  Index add_place(py::handle tensor, Index op, bool backward, int64_t row) {
    return pass_.add({op, backward, dtype_of(tensor).value_or(DType::kF32), row});
  }

  std::optional<TensorView> view_of(py::handle tensor) const {
    return reader_ == nullptr ? std::nullopt : reader_->view(tensor);
  }

  void measure(py::handle tensor, Index op, bool backward) {
    const auto view = view_of(tensor);
    const StreamScope scope(stream_);
    add_place(tensor, op, backward,
              view.has_value() ? internal::RangesAccess::measure(*table_, *view)
                               : measure_slowly(tensor));
  }

  int64_t measure_slowly(py::handle tensor) const {
    return setup_.measure(owner_, tensor).cast<int64_t>();
  }

  // Measures tensors that have their places already.
  void measure_together(const std::vector<std::pair<Index, py::object>>& tensors) {
    std::vector<TensorView> views;
    std::vector<Index> places;
    for (const auto& [place, tensor] : tensors) {
      if (const auto view = view_of(tensor); view.has_value()) {
        views.push_back(*view);
        places.push_back(place);
      } else {
        pass_.place(place).row = measure_slowly(tensor);
      }
    }
    const StreamScope scope(stream_);
    const std::vector<int64_t> rows = internal::RangesAccess::measure_all(*table_, views);
    for (size_t i = 0; i < rows.size(); ++i) pass_.place(places[i]).row = rows[i];
  }

  void measure_awaited() {
    static const py::Attribute kGrad("grad");
    std::vector<std::pair<Index, py::object>> tensors;
    for (const auto& [op, parameter] : awaited_) {
      tensors.emplace_back(pass_.op(op).place, parameter);
    }
    for (const auto& [op, parameter] : awaited_) {
      py::object grad = kGrad.of(parameter);
      if (grad.is_none()) continue;
      tensors.emplace_back(add_place(grad, op, true, TracedPass::kUnreadable), std::move(grad));
    }
    awaited_.clear();
    measure_together(tensors);
  }

  py::object owner_;  // of the table
  RangeTable* const table_;
  const TensorReader* const reader_;  // kept by setup_
  const TraceSetup setup_;
  const Stream stream_ = stream_from(kCurrentStreams);
  const int64_t first_id_ = next_id(int64_t{1} << 32);  // operation i has the id first_id_ + i
  TracedPass pass_;
  std::unordered_map<PyObject*, std::string> inputs_;
  std::unordered_map<PyObject*, Index> known_;  // parameters, buffers and inputs that were used
  std::vector<py::object> kept_;
  std::vector<py::object> marked_;  // weak references
  py::list leaf_hooks_;
  std::vector<std::pair<Index, py::object>> parameters_;  // that are measured together
  std::vector<std::pair<Index, py::object>> awaited_;     // whose gradients are, after backward
  bool active_ = true;
  std::vector<RangeStats> stats_;  // by row of the table
};

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<RangeTrace>(m, "RangeTrace", "Follows a step of a model operation by operation.")
      .def_init([](py::object table, py::object reader, py::tuple dtypes, py::type tensor,
                   py::type parameter, py::object measure, py::list modules, py::dict owners,
                   bool shards) {
        return std::make_shared<RangeTrace>(
            std::move(table), TraceSetup{std::move(reader), std::move(dtypes), std::move(tensor),
                                         std::move(parameter), std::move(measure),
                                         std::move(modules), std::move(owners), shards});
      })
      .def("name_inputs", py::fn<&RangeTrace::name_inputs>)
      .def("follow", py::fn<&RangeTrace::follow>)
      .def("end_forward", py::fn<&RangeTrace::end_forward>)
      .def("stop", py::fn<&RangeTrace::stop>)
      .def("read", py::fn<&RangeTrace::read>)
      .def("report", py::fn<&RangeTrace::report>)
      .def_property_readonly("unmeasured", py::fn<&RangeTrace::unmeasured>);
}

}  // namespace headroom::python
