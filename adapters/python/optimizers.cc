// Optimizer, SGD, Adam, AdamW and Lion. They do not own weights and gradients: headroom/_optim.py
// and headroom/torch/_optim.py keep those alive. Numbers that the core refuses raise
// headroom.Error.
#include <headroom/optimizer.h>

#include <utility>

#include "tensors.h"

/// From tuples (name, weight, gradient or None), optionally with whether this rank counts the
/// gradient in the norm.
template <>
struct headroom::python::bind::Converter<headroom::Parameter> {
  static Parameter from(handle from) {
    const auto fields = from.cast<tuple>();
    Parameter parameter{fields[0].cast<std::string>(), view_of(fields[1]), view_of(fields[2])};
    if (fields.size() > 3) parameter.counted = fields[3].cast<bool>();
    return parameter;
  }
};

namespace headroom::python {
namespace {

// The second parameter selects the overload.
SGDOptions options_of(const py::dict& from, const SGDOptions&) {
  return {from["lr"].cast<double>(), from["momentum"].cast<double>(),
          from["dampening"].cast<double>(), from["weight_decay"].cast<double>(),
          from["nesterov"].cast<bool>()};
}

LionOptions options_of(const py::dict& from, const LionOptions&) {
  const auto betas = from["betas"].cast<std::pair<double, double>>();
  return {from["lr"].cast<double>(), betas.first, betas.second,
          from["weight_decay"].cast<double>()};
}

template <typename Options>  // of Adam and AdamW
Options options_of(const py::dict& from, const Options&) {
  const auto betas = from["betas"].cast<std::pair<double, double>>();
  return {from["lr"].cast<double>(), betas.first, betas.second, from["eps"].cast<double>(),
          from["weight_decay"].cast<double>()};
}

/// A fused optimizer over a framework's tensors, which may move: before it uses them the core calls
/// `on_refresh`, which calls rebind(), or returns False if the tensors cannot be used any more.
template <typename Core>
class Refreshed : public Core {
 public:
  using Core::Core;
  ~Refreshed() override {
    const py::gil_scoped_acquire lock;
    on_refresh = {};
  }
  Refreshed(const Refreshed&) = delete;
  Refreshed& operator=(const Refreshed&) = delete;
  void refresh() override {
    const py::gil_scoped_acquire lock;
    if (!on_refresh.is_none() && !on_refresh().template cast<bool>()) this->drop_gradients();
  }
  bool follows_weights() const override { return !on_refresh.is_none(); }
  py::object on_refresh = py::none();
};

// An allocator of the core that calls a Python function (bytes, CUDA device or -1), which returns a
// torch tensor. What the function raises passes through the core.
StateAllocator allocator_of(const py::object& function) {
  if (function.is_none()) return nullptr;
  return [function = hold(function)](size_t bytes, const Device& device) -> std::shared_ptr<void> {
    const py::gil_scoped_acquire lock;
    const py::handle call(static_cast<PyObject*>(function.get()));
    const py::object tensor = call(bytes, device.type == DeviceType::kCUDA ? device.index : -1);
    const auto address = tensor.attr("data_ptr")().cast<uintptr_t>();
    return {hold(tensor), reinterpret_cast<void*>(address)};
  };
}

py::tuple state_of(const py::object& self, uintptr_t stream) {
  const auto state = on_stream<&FusedOptimizer::state>(self.cast<FusedOptimizer&>(), stream);
  py::list tensors;
  for (const NamedTensor& named : state.tensors) {
    const Tensor tensor =
        state.copies == nullptr ? owned_by(self, named.tensor) : Tensor{named.tensor, state.copies};
    tensors.append(py::make_tuple(named.name, tensor, named.parameter));
  }
  return py::make_tuple(state.steps, tensors);
}

void load_state(FusedOptimizer& self, std::vector<int64_t> steps,
                const std::vector<std::tuple<std::string, TensorView, size_t>>& tensors) {
  OptimizerState state;
  state.steps = std::move(steps);
  for (const auto& [name, tensor, index] : tensors) state.tensors.push_back({name, tensor, index});
  self.load_state(state);
}

// Python passes all parameters by add_group(); the core's group 0 stays empty.
template <typename Core, typename Options>
void bind_one(py::module_& m, const char* name) {
  py::class_<Refreshed<Core>, FusedOptimizer>(m, name)
      .def_init(
          [](bool master_weights, bool stochastic_rounding, uint64_t seed, const std::string& state,
             const py::object& allocator) {
            auto made = std::make_unique<Refreshed<Core>>(
                std::vector<Parameter>{}, Options{},
                Precision{master_weights, stochastic_rounding, seed, state_format(state)});
            made->set_allocator(allocator_of(allocator));
            return made;
          },
          py::arg("master_weights"), py::arg("stochastic_rounding"), py::arg("seed"),
          py::arg("state"), py::arg("allocator") = py::none())
      .def("set_on_refresh",
           [](Refreshed<Core>& self, const py::object& call) { self.on_refresh = call; })
      .def("add_group",
           [](Refreshed<Core>& self, std::vector<Parameter> parameters, const py::dict& options,
              uintptr_t stream) {
             const Options made = options_of(options, Options{});
             const Work work(stream);
             return self.add_group(std::move(parameters), made);
           })
      .def("set_options", [](Refreshed<Core>& self, size_t group, const py::dict& options) {
        self.set_options(options_of(options, Options{}), group);
      });
}

}  // namespace

void bind_optimizers(py::module_& m) {
  py::class_<Optimizer>(m, "Optimizer", py::dynamic_attr())
      .def("zero_grad", on_stream<&Optimizer::zero_grad>, py::arg("stream") = 0)
      .def("rebind", on_stream<&Optimizer::rebind>)
      .def("set_grad", py::fn<&Optimizer::set_grad>);
  py::class_<FusedOptimizer, Optimizer>(m, "FusedOptimizer")
      .def("apply", on_stream<&FusedOptimizer::apply>, py::arg("multiplier"),
           py::arg("clear_grads") = false, py::arg("stream") = 0)
      .def("allocate", on_stream<&FusedOptimizer::allocate>)
      .def("allocated", py::fn<&FusedOptimizer::allocated>)
      .def("steps", on_stream<&FusedOptimizer::steps>, py::arg("index"),
           py::arg("stream") = kCurrentStreams)
      .def("refresh_master", on_stream<&FusedOptimizer::refresh_master>)
      .def("follow_weight", on_stream<&FusedOptimizer::follow_weight>)
      .def("state", py::fn<&state_of>, py::arg("stream") = kCurrentStreams,
           "Steps of each parameter, and a list of (name, tensor, index of the parameter). The "
           "tensors are views of this optimizer's memory and keep it alive; if its state is 'half' "
           "or 'byte' they are copies in FP32 on the CPU.")
      .def("load_state", on_stream<&load_state>);
  bind_one<SGD, SGDOptions>(m, "SGD");
  bind_one<Adam, AdamOptions>(m, "Adam");
  bind_one<AdamW, AdamWOptions>(m, "AdamW");
  bind_one<Lion, LionOptions>(m, "Lion");
}

}  // namespace headroom::python
