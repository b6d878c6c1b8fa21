// Attributes and items, for code that runs often.
#ifndef HEADROOM_ADAPTERS_PYTHON_BIND_ACCESS_H_
#define HEADROOM_ADAPTERS_PYTHON_BIND_ACCESS_H_

#include "bind/object.h"

namespace headroom::python::bind {

/// An attribute of objects, by a name that is kept.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  object of(handle from) const { return object::steal(PyObject_GetAttr(from.ptr(), name_)); }
  /// Looks into the instance's own dictionary only, which takes a tenth of the time if the
  /// attribute is absent. Null if it is.
  handle own(handle from) const {
    const object values = dictionary(from);
    return values ? PyDict_GetItemWithError(values.ptr(), name_) : nullptr;
  }
  void set_own(handle from, handle value) const {
    const object values = dictionary(from);
    if (values && PyDict_SetItem(values.ptr(), name_, value.ptr()) != 0) PyErr_Clear();
  }
  void erase_own(handle from) const {
    const object values = dictionary(from);
    if (values && PyDict_DelItem(values.ptr(), name_) != 0) PyErr_Clear();
  }

 private:
  static object dictionary(handle from) {
    PyObject* const values = PyObject_GenericGetDict(from.ptr(), nullptr);
    if (values != nullptr) return object::steal(values);
    PyErr_Clear();
    return {};
  }
  PyObject* name_;  // lives as long as the interpreter
};

/// Calls visit(item) for every item of a tuple or list, in order.
template <typename Visit>
void for_each_item(handle items, const Visit& visit) {
  if (PyTuple_Check(items.ptr()) != 0) {
    const Py_ssize_t size = PyTuple_Size(items.ptr());
    for (Py_ssize_t i = 0; i < size; ++i) visit(handle(PyTuple_GetItem(items.ptr(), i)));
  } else {  // a list may change meanwhile
    for (Py_ssize_t i = 0; i < PyList_Size(items.ptr()); ++i) {
      visit(object::borrow(PyList_GetItem(items.ptr(), i)));
    }
  }
}

/// Calls visit(item) for every item of anything that can be iterated over.
template <typename Visit>
void for_each_in(handle iterable, const Visit& visit) {
  const object iterator = object::steal(PyObject_GetIter(iterable.ptr()));
  while (PyObject* const item = PyIter_Next(iterator.ptr())) visit(object::steal(item));
  if (PyErr_Occurred() != nullptr) throw error_already_set();
}

}  // namespace headroom::python::bind

#endif  // HEADROOM_ADAPTERS_PYTHON_BIND_ACCESS_H_
