// adapters/python/bind: functions and classes of C++ as a Python module, over CPython's limited API
// only, so that one binary serves Python 3.10 and every later version. It knows nothing of
// Headroom.
//
// This header: references to Python objects, the interpreter lock, and exceptions in both
// directions.
#ifndef HEADROOM_ADAPTERS_PYTHON_BIND_OBJECT_H_
#define HEADROOM_ADAPTERS_PYTHON_BIND_OBJECT_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace headroom::python::bind {

/// Acquires the interpreter lock, in any thread.
class gil_scoped_acquire {
 public:
  gil_scoped_acquire() : state_(PyGILState_Ensure()) {}
  ~gil_scoped_acquire() { PyGILState_Release(state_); }
  gil_scoped_acquire(const gil_scoped_acquire&) = delete;
  gil_scoped_acquire& operator=(const gil_scoped_acquire&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Releases the interpreter lock, which this thread must hold.
class gil_scoped_release {
 public:
  gil_scoped_release() : state_(PyEval_SaveThread()) {}
  ~gil_scoped_release() { PyEval_RestoreThread(state_); }
  gil_scoped_release(const gil_scoped_release&) = delete;
  gil_scoped_release& operator=(const gil_scoped_release&) = delete;

 private:
  PyThreadState* state_;
};

/// A C++ exception that becomes a Python exception of one of the built-in classes.
class python_error : public std::runtime_error {
 public:
  python_error(PyObject* kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  PyObject* kind() const { return kind_; }

 private:
  PyObject* kind_;
};

inline python_error type_error(const std::string& message) { return {PyExc_TypeError, message}; }
inline python_error value_error(const std::string& message) { return {PyExc_ValueError, message}; }
inline python_error buffer_error(const std::string& message) {
  return {PyExc_BufferError, message};
}
inline python_error attribute_error(const std::string& message) {
  return {PyExc_AttributeError, message};
}

/// A value that is not of the wanted type. A TypeError; calls add the name of the argument.
class cast_error : public python_error {
 public:
  cast_error(const std::string& wanted, PyObject* found);
};

/// A Python exception on its way through C++: takes the one that is raised now.
class error_already_set : public std::exception {
 public:
  error_already_set();
  const char* what() const noexcept override;
  /// Raises it in Python again.
  void restore() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Call it in a catch (...) block: raises the C++ exception in Python.
void raise_current_exception();

/// Converts exceptions of the module's own classes: rethrows the current exception, and raises a
/// Python exception for those that it knows. The others must pass through.
using Translator = void (*)();
void set_translator(Translator translator);

class object;
template <typename T>
struct Converter;

/// A borrowed reference.
class handle {
 public:
  handle() = default;
  handle(PyObject* pointer) : pointer_(pointer) {}  // NOLINT(google-explicit-constructor)
  PyObject* ptr() const { return pointer_; }
  explicit operator bool() const { return pointer_ != nullptr; }
  bool is_none() const { return pointer_ == Py_None; }
  bool is(handle other) const { return pointer_ == other.pointer_; }

  object attr(const char* name) const;
  /// `otherwise` if there is no such attribute.
  object attr(const char* name, const object& otherwise) const;
  template <typename... Arguments>
  object operator()(const Arguments&... arguments) const;
  /// Throws cast_error. `T` may be a reference to a bound class.
  template <typename T>
  decltype(auto) cast() const {
    return Converter<T>::from(*this);
  }

 private:
  PyObject* pointer_ = nullptr;
};

/// An owned reference. The interpreter lock is held wherever one is copied or destroyed.
class object : public handle {
 public:
  object() = default;
  object(const object& other) : handle(other) { Py_XINCREF(ptr()); }
  object(object&& other) noexcept : handle(other.release()) {}
  object& operator=(object other) noexcept {
    std::swap(static_cast<handle&>(*this), static_cast<handle&>(other));
    return *this;
  }
  ~object() { Py_XDECREF(ptr()); }

  static object borrow(handle from) {
    Py_XINCREF(from.ptr());
    return object(from);
  }
  /// Takes over a new reference. Throws error_already_set for null.
  static object steal(PyObject* from) {
    if (from == nullptr) throw error_already_set();
    return object(handle(from));
  }
  PyObject* release() {
    PyObject* const pointer = ptr();
    static_cast<handle&>(*this) = handle();
    return pointer;
  }

 private:
  explicit object(handle from) : handle(from) {}
};

inline object none() { return object::borrow(Py_None); }

inline object handle::attr(const char* name) const {
  return object::steal(PyObject_GetAttrString(ptr(), name));
}

inline object handle::attr(const char* name, const object& otherwise) const {
  PyObject* const found = PyObject_GetAttrString(ptr(), name);
  if (found != nullptr) return object::steal(found);
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw error_already_set();
  PyErr_Clear();
  return otherwise;
}

/// Throws error_already_set if a function of CPython has failed.
inline void check(int status) {
  if (status < 0) throw error_already_set();
}

// Objects of one kind. An argument of such a type accepts nothing else.
class tuple : public object {
 public:
  explicit tuple(object from) : object(std::move(from)) {}
  explicit tuple(size_t size) : object(steal(PyTuple_New(static_cast<Py_ssize_t>(size)))) {}
  size_t size() const { return static_cast<size_t>(PyTuple_Size(ptr())); }
  handle operator[](size_t i) const {
    PyObject* const item = PyTuple_GetItem(ptr(), static_cast<Py_ssize_t>(i));
    if (item == nullptr) throw error_already_set();
    return item;
  }
};

class list : public object {
 public:
  explicit list(object from) : object(std::move(from)) {}
  list() : object(steal(PyList_New(0))) {}
  size_t size() const { return static_cast<size_t>(PyList_Size(ptr())); }
  handle operator[](size_t i) const {
    PyObject* const item = PyList_GetItem(ptr(), static_cast<Py_ssize_t>(i));
    if (item == nullptr) throw error_already_set();
    return item;
  }
  template <typename T>
  void append(const T& value);
};

class dict : public object {
 public:
  explicit dict(object from) : object(std::move(from)) {}
  dict() : object(steal(PyDict_New())) {}
  size_t size() const { return static_cast<size_t>(PyDict_Size(ptr())); }
  bool contains(const char* key) const { return bool(find(key)); }
  /// Throws a KeyError.
  handle operator[](const char* key) const;
  template <typename Key, typename Value>
  void set(const Key& key, const Value& value);
  /// Calls visit(key, value) for every entry.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t place = 0;
    while (PyDict_Next(ptr(), &place, &key, &value) != 0) visit(handle(key), handle(value));
  }

 private:
  handle find(const char* key) const;
};

/// All keyword arguments of a call; the last parameter of its function.
class kwargs : public dict {
 public:
  using dict::dict;
};

class type : public object {
 public:
  explicit type(object from) : object(std::move(from)) {}
};

class capsule : public object {
 public:
  explicit capsule(object from) : object(std::move(from)) {}
  capsule(void* pointer, const char* name, PyCapsule_Destructor destroy)
      : object(steal(PyCapsule_New(pointer, name, destroy))) {}
  const char* name() const { return PyCapsule_GetName(ptr()); }
  void set_name(const char* name) { check(PyCapsule_SetName(ptr(), name)); }
  void* get_pointer() const {
    void* const pointer = PyCapsule_GetPointer(ptr(), name());
    if (pointer == nullptr) throw error_already_set();
    return pointer;
  }
};

}  // namespace headroom::python::bind

#endif  // HEADROOM_ADAPTERS_PYTHON_BIND_OBJECT_H_
