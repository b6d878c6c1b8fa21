// Classes of C++ in Python. An instance owns its object through a std::shared_ptr, so that C++ may
// share it.
#ifndef HEADROOM_ADAPTERS_PYTHON_BIND_CLASS_H_
#define HEADROOM_ADAPTERS_PYTHON_BIND_CLASS_H_

#include <memory>
#include <type_traits>
#include <utility>

#include "bind/function.h"

namespace headroom::python::bind {

/// Py_buffer, which the limited API has from 3.11 on only; its layout is that of 3.10 and later.
struct Buffer {
  void* buf;
  PyObject* obj;
  Py_ssize_t len;
  Py_ssize_t itemsize;
  int readonly;
  int ndim;
  char* format;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  Py_ssize_t* suboffsets;
  void* internal;
};
// Flags of a request.
inline constexpr int kBufferWritable = 0x0001, kBufferFormat = 0x0004, kBufferShape = 0x0008,
                     kBufferStrides = 0x0010 | kBufferShape;

/// A filled buffer, released with the interpreter lock. Throws error_already_set if `from` has none
/// for these flags.
std::shared_ptr<Buffer> get_buffer(handle from, int flags);
bool is_contiguous(const Buffer& buffer);

/// One-dimensional memory of an instance, for its readers.
struct Memory {
  void* data;
  Py_ssize_t item_size;
  const char* format;
  Py_ssize_t count;
  bool read_only;
};

/// For the buffer protocol.
int offer_memory(handle self, Memory (*memory)(handle self), Buffer* view, int flags);

/// A class has a __dict__, or offers its memory: class_<T>(m, "T", "doc", dynamic_attr()).
struct dynamic_attr {};
struct buffer {
  int (*offer)(PyObject* self, Buffer* view, int flags);
};
template <Memory (*memory)(handle self)>
inline constexpr buffer buffer_of{[](PyObject* self, Buffer* view, int flags) {
  return offer_memory(self, memory, view, flags);
}};

/// What a class is made of.
struct ClassRecord {
  const char* name = nullptr;
  const char* doc = nullptr;
  PyTypeObject* base = nullptr;
  bool has_dict = false;
  int (*offer)(PyObject* self, Buffer* view, int flags) = nullptr;

  void add(const char* text) { doc = text; }
  void add(dynamic_attr) { has_dict = true; }
  void add(buffer with) { offer = with.offer; }
};
/// Creates the class and adds it to the module.
PyTypeObject* make_class(module_& m, const ClassRecord& record);
/// Adds an attribute of a class. A class with __eq__ loses its hash, as in Python.
void add_attribute(PyTypeObject* type, const char* name, const object& value);

/// Adds a read-only attribute.
void add_property(PyTypeObject* type, const char* name, object (*get)(handle self),
                  const char* doc);

/// A bound class under construction. `Base` is a bound class that T derives from.
template <typename T, typename Base = void>
class class_ {
 public:
  template <typename... Extra>
  class_(module_& m, const char* name, const Extra&... extra) {
    ClassRecord record;
    record.name = name;
    if constexpr (!std::is_void_v<Base>) record.base = type_of<Base>;
    (record.add(extra), ...);
    type_of<T> = make_class(m, record);
  }

  /// T's constructor with these parameters.
  template <typename... A, typename... Extra>
  class_& def_constructor(const Extra&... extra) {
    return def("__init__", Construct<A...>{}, extra...);
  }
  /// A function that returns T, or a std::unique_ptr or std::shared_ptr to it.
  template <typename F, typename... Extra>
  class_& def_init(F, const Extra&... extra) {
    return def("__init__", Initialize<F, typename Traits<F>::Parameters>{}, extra...);
  }

  template <typename F, typename... Extra>
  class_& def(const char* name, F, const Extra&... extra) {
    PyMethodDef* const definition = Entry<F, true>::define(name, extra...);
    add_attribute(type_of<T>, name, object::steal(PyDescr_NewMethod(type_of<T>, definition)));
    return *this;
  }
  template <typename F, typename... Extra>
  class_& def_static(const char* name, F, const Extra&... extra) {
    PyMethodDef* const definition = Entry<F, false>::define(name, extra...);
    add_attribute(type_of<T>, name, object::steal(PyCFunction_NewEx(definition, nullptr, nullptr)));
    return *this;
  }

  template <typename F>
  class_& def_property_readonly(const char* name, F, const char* doc = nullptr) {
    add_property(type_of<T>, name, &get<F>, doc);
    return *this;
  }
  /// A data member that Python reads: def_readonly<&T::member>("member").
  template <auto member>
  class_& def_readonly(const char* name, const char* doc = nullptr) {
    return def_property_readonly(name, fn<member>, doc);
  }
  /// Pickles an instance as what `Save` returns, and makes one of it with `Load`.
  template <typename Save, typename Load>
  class_& def_pickle(Save save, Load) {
    def("__getstate__", save);
    return def("__setstate__", Initialize<Load, typename Traits<Load>::Parameters>{});
  }

 private:
  static Instance& instance(handle self) { return *reinterpret_cast<Instance*>(self.ptr()); }
  template <typename Made>
  static void own(handle self, std::shared_ptr<Made> made) {
    T* const pointer = made.get();
    if constexpr (!std::is_void_v<Base>) {  // see Instance::owner
      if (static_cast<void*>(static_cast<Base*>(pointer)) != static_cast<void*>(pointer)) {
        throw type_error("a base class that is not at the start of its class");
      }
    }
    if constexpr (requires { pointer->set_self(self); }) pointer->set_self(self);
    instance(self).owner = std::shared_ptr<T>(std::move(made));
  }

  template <typename... A>
  struct Construct {
    void operator()(handle self, A... arguments) const {
      own(self, std::make_shared<T>(std::forward<A>(arguments)...));
    }
  };
  template <typename F, typename Parameters>
  struct Initialize;
  template <typename F, typename... A>
  struct Initialize<F, std::tuple<A...>> {
    void operator()(handle self, A... arguments) const {
      using Made = typename Traits<F>::Result;
      if constexpr (std::is_same_v<Made, T>) {  // T need not be movable
        own(self, std::shared_ptr<T>(new T(F{}(std::forward<A>(arguments)...))));
      } else {
        own(self, std::shared_ptr<T>(F{}(std::forward<A>(arguments)...)));
      }
    }
  };

  template <typename F>
  static object get(handle self) {
    using Self = std::tuple_element_t<0, typename Traits<F>::Parameters>;
    return to_python(F{}(Converter<Self>::from(self)));
  }
};

}  // namespace headroom::python::bind

#endif  // HEADROOM_ADAPTERS_PYTHON_BIND_CLASS_H_
