// Tensors from the buffer protocol, DLPack and raw pointers, and back, without copies.
#include "tensors.h"

#include <dlpack/dlpack.h>
#include <headroom/error.h>

#include <optional>
#include <utility>

namespace headroom::python {
namespace {

// DLManagedTensorVersioned of DLPack 1.0, which Debian's header lacks.
struct Versioned {
  uint32_t major;
  uint32_t minor;
  void* manager_ctx;
  void (*deleter)(Versioned*);
  uint64_t flags;
  DLTensor dl_tensor;
};
constexpr uint64_t kReadOnlyFlag = 1;

// The type of a format string of the buffer protocol. It has none for bfloat16: `wanted` (the
// user's dtype argument) is the meaning of 16-bit integers.
DType dtype_of_format(const char* format, Py_ssize_t size, std::optional<DType> wanted) {
  const char* letter = format == nullptr ? "B" : format;
  if (*letter == '@' || *letter == '=' || *letter == '<') ++letter;
  if (*letter == 'e') return DType::kF16;
  if (*letter == 'f') return DType::kF32;
  if (*letter == 'd') return DType::kF64;
  const bool two_bytes = (*letter == 'H' || *letter == 'h') && size == 2;
  if (two_bytes && wanted.has_value() && size_of(*wanted) == 2) return *wanted;
  throw Error(
      ErrorCode::kUnsupported,
      std::string("The array has format '") + letter +
          "'; Headroom supports native float16, float32 and float64, and 16-bit integers with "
          "dtype=\"bfloat16\" or \"float16\".");
}

// Holds the buffer, and with it the exporter, as long as the Tensor exists.
Tensor from_buffer(py::handle object, std::optional<DType> wanted) {
  const auto buffer = py::get_buffer(object, py::kBufferStrides | py::kBufferFormat);
  if (!py::is_contiguous(*buffer)) {
    throw Error(ErrorCode::kUnsupported,
                "The array is not contiguous in row-major order; copy it first, for example with "
                "numpy.ascontiguousarray.");
  }
  Tensor tensor;
  tensor.view.dtype = dtype_of_format(buffer->format, buffer->itemsize, wanted);
  tensor.view.count = buffer->len / buffer->itemsize;
  if (tensor.view.count != 0) tensor.view.data = buffer->buf;
  tensor.view.read_only = buffer->readonly != 0;
  tensor.memory = buffer;
  return tensor;
}

// Consumes a DLPack capsule: renaming it is the protocol's way to take over the deleter.
template <typename Managed>
std::shared_ptr<Managed> take(py::capsule& capsule, const char* used) {
  auto* const managed = static_cast<Managed*>(capsule.get_pointer());
  capsule.set_name(used);
  return {managed, [](Managed* tensor) {
            const py::gil_scoped_acquire lock;
            if (tensor->deleter != nullptr) tensor->deleter(tensor);
          }};
}

// Accepts capsules of DLPack 1 and the unversioned ones before it, which have no read-only flag.
Tensor from_capsule(py::capsule capsule) {
  const std::string name = capsule.name() == nullptr ? "" : capsule.name();
  if (name == "dltensor") {
    const auto managed = take<DLManagedTensor>(capsule, "used_dltensor");
    return {headroom::from_dlpack(managed.get()), managed};
  }
  if (name == "dltensor_versioned") {
    const auto managed = take<Versioned>(capsule, "used_dltensor_versioned");
    if (managed->major != 1) {
      throw Error(ErrorCode::kUnsupported,
                  "The DLPack capsule has version " + std::to_string(managed->major) +
                      "; Headroom reads version 1 and the unversioned one.");
    }
    DLManagedTensor plain = {};
    plain.dl_tensor = managed->dl_tensor;
    Tensor tensor{headroom::from_dlpack(&plain), managed};
    tensor.view.read_only = (managed->flags & kReadOnlyFlag) != 0;
    return tensor;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "The DLPack capsule is named '" + name +
                  "'; it was consumed before, or is not a DLPack capsule.");
}

// A capsule whose tensor shares ownership of the memory. Its deleter restores the context of the
// core's descriptor and calls the core's deleter.
py::capsule to_capsule(const Tensor& tensor) {
  DLManagedTensor* const managed = headroom::to_dlpack(tensor.view);
  struct Kept {
    void* context;
    void (*deleter)(DLManagedTensor*);
    std::shared_ptr<void> memory;
  };
  managed->manager_ctx = new Kept{managed->manager_ctx, managed->deleter, tensor.memory};
  managed->deleter = [](DLManagedTensor* self) {
    const std::unique_ptr<Kept> kept(static_cast<Kept*>(self->manager_ctx));
    self->manager_ctx = kept->context;
    kept->deleter(self);
  };
  return py::capsule(managed, "dltensor", [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;  // a consumer owns it now
    void* const pointer = PyCapsule_GetPointer(capsule, "dltensor");
    auto* const mine = static_cast<DLManagedTensor*>(pointer);
    mine->deleter(mine);
  });
}

// Raises TypeError for CUDA memory, which the buffer protocol cannot describe.
py::Memory memory_of(py::handle tensor) {
  const TensorView& view = tensor.cast<const Tensor&>().view;
  if (view.device.type != DeviceType::kCPU) {
    throw py::type_error("This tensor is on a CUDA device; use DLPack.");
  }
  const char* const formats[] = {"e", "H", "f", "d"};  // bfloat16 as 16-bit integers
  return {view.data, static_cast<Py_ssize_t>(size_of(view.dtype)),
          formats[static_cast<int>(view.dtype)], view.count, view.read_only};
}

}  // namespace

DType dtype_named(const std::string& name) {
  if (name == "float16" || name == "f16") return DType::kF16;
  if (name == "bfloat16" || name == "bf16") return DType::kBF16;
  if (name == "float32" || name == "f32") return DType::kF32;
  if (name == "float64" || name == "f64") return DType::kF64;
  throw Error(ErrorCode::kUnsupported,
              "The type '" + name + "' is not float16, bfloat16, float32 or float64.");
}

TensorView view_of(py::handle item) {
  if (item.is_none()) return {};
  if (PyTuple_CheckExact(item.ptr()) == 0) return item.cast<const Tensor&>().view;
  if (PyTuple_Size(item.ptr()) != 4) {
    throw py::type_error("a tensor is (pointer, type, count, device)");
  }
  // Without casts, which are slow: a step converts one tuple per gradient.
  const auto field = [&](Py_ssize_t i) { return PyTuple_GetItem(item.ptr(), i); };
  TensorView view;
  view.data = PyLong_AsVoidPtr(field(0));
  view.dtype = static_cast<DType>(PyLong_AsLong(field(1)));
  view.count = PyLong_AsLongLong(field(2));
  const auto device = static_cast<int>(PyLong_AsLong(field(3)));
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (device >= 0) view.device = {DeviceType::kCUDA, device};
  return view;
}

Tensor owned_by(py::object owner, const TensorView& view) { return {view, hold(std::move(owner))}; }

void bind_tensors(py::module_& m) {
  py::class_<Tensor>(
      m, "Tensor", py::buffer_of<&memory_of>,
      "A view of memory: a type, a count and a device. NumPy and every framework with "
      "DLPack can access it without a copy.")
      .def_static("from_buffer",
                  [](py::handle object, const std::optional<std::string>& dtype) {
                    std::optional<DType> wanted;
                    if (dtype.has_value()) wanted = dtype_named(*dtype);
                    return from_buffer(object, wanted);
                  })
      .def_static("from_capsule", py::fn<&from_capsule>)
      .def_static("from_pointer",
                  [](uintptr_t data, const std::string& dtype, int64_t count, int device,
                     bool read_only, py::object owner) {
                    TensorView view{reinterpret_cast<void*>(data), dtype_named(dtype), count};
                    if (device >= 0) view.device = {DeviceType::kCUDA, device};
                    view.read_only = read_only;
                    return owned_by(std::move(owner), view);
                  })
      .def("frozen",
           [](Tensor tensor) {
             tensor.view.read_only = true;
             return tensor;
           })
      .def_property_readonly("dtype", [](const Tensor& t) { return to_string(t.view.dtype); })
      .def_property_readonly("read_only", [](const Tensor& t) { return t.view.read_only; })
      .def_property_readonly("device",
                             [](const Tensor& t) {
                               if (t.view.device.type == DeviceType::kCPU)
                                 return std::string("cpu");
                               return "cuda:" + std::to_string(t.view.device.index);
                             })
      .def("__len__", [](const Tensor& t) { return t.view.count; })
      .def("__dlpack__",
           [](const Tensor& t, const py::kwargs& options) {
             if (options.contains("copy") && options["copy"].is(Py_True)) {
               throw py::buffer_error("A Tensor exports views only; copy the result.");
             }
             return to_capsule(t);
           })
      .def("__dlpack_device__", [](const Tensor& t) {
        const bool cuda = t.view.device.type == DeviceType::kCUDA;
        return py::make_tuple(static_cast<int>(cuda ? kDLCUDA : kDLCPU), t.view.device.index);
      });
}

}  // namespace headroom::python
