// Conversions, calls and exceptions.
#include <exception>
#include <new>

#include "bind/function.h"

namespace headroom::python::bind {
namespace {

Translator translator = nullptr;

// The name of a class, as in error messages of Python.
std::string class_of(PyObject* of) {
  try {
    return string_from(handle(reinterpret_cast<PyObject*>(Py_TYPE(of))).attr("__name__"));
  } catch (const std::exception&) {
    return "object";
  }
}

// A number or text that could not be converted: the exception of CPython becomes a cast_error.
[[noreturn]] void refuse_raised(const char* wanted, handle found) {
  PyErr_Clear();
  refuse(wanted, found);
}

object index_of(handle from) {
  if (PyLong_Check(from.ptr())) return object::borrow(from);
  if (PyIndex_Check(from.ptr()) == 0) refuse("int", from);
  PyObject* const index = PyNumber_Index(from.ptr());
  if (index == nullptr) refuse_raised("int", from);
  return object::steal(index);
}

}  // namespace

cast_error::cast_error(const std::string& wanted, PyObject* found)
    : python_error(PyExc_TypeError, "must be " + wanted + ", not " + class_of(found)) {}

void refuse(const char* wanted, handle found) { throw cast_error(wanted, found.ptr()); }

struct error_already_set::State {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  std::string text = "a Python exception";

  State() {
    // Replaced by PyErr_GetRaisedException() in 3.12, which the limited API of 3.10 lacks.
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value == nullptr) return;
    if (PyObject* const words = PyObject_Str(value)) {
      const char* const letters = PyUnicode_AsUTF8AndSize(words, nullptr);
      if (letters != nullptr) text = class_of(value) + ": " + letters;
      Py_DECREF(words);
    }
    PyErr_Clear();
  }
  ~State() {
    const gil_scoped_acquire lock;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

error_already_set::error_already_set() : state_(std::make_shared<State>()) {}

const char* error_already_set::what() const noexcept { return state_->text.c_str(); }

void error_already_set::restore() const {
  Py_XINCREF(state_->type);
  Py_XINCREF(state_->value);
  Py_XINCREF(state_->trace);
  PyErr_Restore(state_->type, state_->value, state_->trace);
}

void set_translator(Translator to) { translator = to; }

void raise_current_exception() {
  try {
    if (translator == nullptr) throw;
    translator();
  } catch (const error_already_set& error) {
    error.restore();
  } catch (const python_error& error) {
    PyErr_SetString(error.kind(), error.what());
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception of an unknown type");
  }
}

handle dict::find(const char* key) const {
  const object name = to_python(key);
  PyObject* const found = PyDict_GetItemWithError(ptr(), name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw error_already_set();
  return found;
}

handle dict::operator[](const char* key) const {
  const handle found = find(key);
  if (!found) throw python_error(PyExc_KeyError, key);
  return found;
}

std::shared_ptr<void> hold(object owner) {
  return {owner.release(), [](void* held) {
            const gil_scoped_acquire lock;
            Py_XDECREF(static_cast<PyObject*>(held));
          }};
}

int64_t signed_from(handle from) {
  const int64_t value = PyLong_AsLongLong(index_of(from).ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) refuse_raised("int of 64 bits", from);
  return value;
}

uint64_t unsigned_from(handle from) {
  const uint64_t value = PyLong_AsUnsignedLongLong(index_of(from).ptr());
  if (value == ~uint64_t{0} && PyErr_Occurred() != nullptr) {
    refuse_raised("int from 0 to 2^64 - 1", from);
  }
  return value;
}

double double_from(handle from) {
  const double value = PyFloat_AsDouble(from.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) refuse_raised("float", from);
  return value;
}

bool bool_from(handle from) {
  if (from.ptr() == Py_True || from.ptr() == Py_False) return from.ptr() == Py_True;
  if (PyType_GetSlot(Py_TYPE(from.ptr()), Py_nb_bool) == nullptr) refuse("bool", from);
  const int value = PyObject_IsTrue(from.ptr());
  if (value < 0) refuse_raised("bool", from);
  return value != 0;
}

std::string string_from(handle from) {
  Py_ssize_t size = 0;
  if (PyUnicode_Check(from.ptr())) {
    const char* const letters = PyUnicode_AsUTF8AndSize(from.ptr(), &size);
    if (letters == nullptr) refuse_raised("str of valid Unicode", from);
    return {letters, static_cast<size_t>(size)};
  }
  char* letters = nullptr;
  if (PyBytes_Check(from.ptr()) == 0) refuse("str", from);
  check(PyBytes_AsStringAndSize(from.ptr(), &letters, &size));
  return {letters, static_cast<size_t>(size)};
}

tuple items_of(handle from) {
  if (PySequence_Check(from.ptr()) == 0 || PyUnicode_Check(from.ptr()) ||
      PyBytes_Check(from.ptr())) {
    refuse("sequence", from);
  }
  return tuple(object::steal(PySequence_Tuple(from.ptr())));
}

Instance& instance_of(handle from, PyTypeObject* type) {
  if (type == nullptr) throw type_error("This class of C++ has no class in Python.");
  if (!PyObject_TypeCheck(from.ptr(), type)) {
    refuse(string_from(handle(reinterpret_cast<PyObject*>(type)).attr("__name__")).c_str(), from);
  }
  auto& instance = *reinterpret_cast<Instance*>(from.ptr());
  if (instance.owner == nullptr) {
    throw type_error(class_of(from.ptr()) +
                     ".__init__() must call the __init__() of its base class.");
  }
  return instance;
}

object new_instance(PyTypeObject* type, std::shared_ptr<void> owner) {
  if (type == nullptr) throw type_error("This class of C++ has no class in Python.");
  object made = object::steal(PyType_GenericAlloc(type, 0));
  new (&reinterpret_cast<Instance*>(made.ptr())->owner) std::shared_ptr<void>(std::move(owner));
  return made;
}

void Signature::add(const arg& argument) {
  named.emplace_back(object::steal(PyUnicode_InternFromString(argument.name())),
                     argument.default_value());
}

void Signature::document() {
  std::string parameters = has_self ? "$self" : "";
  for (const auto& [word, value] : named) {
    if (!parameters.empty()) parameters += ", ";
    parameters += string_from(word);
    if (!value) continue;
    parameters += "=" + string_from(object::steal(PyObject_Repr(value.ptr())));
  }
  if (has_kwargs) parameters += parameters.empty() ? "**settings" : ", **settings";
  doc = std::string(name) + "(" + parameters + ")\n--\n\n" + doc;
}

std::string Signature::parameter(size_t i) const {
  const size_t first = has_self ? 1 : 0;
  if (i >= first && i - first < named.size()) {
    return "'" + string_from(named[i - first].first) + "'";
  }
  return std::to_string(i - first + 1);
}

bool Signature::assign_keyword(PyObject* key, PyObject* value, size_t first, size_t count,
                               handle* out, object* more) const {
  for (size_t i = 0; i < named.size() && first + i < count; ++i) {
    PyObject* const mine = named[i].first.ptr();
    if (mine != key && PyUnicode_Compare(mine, key) != 0) continue;
    if (out[first + i]) {
      PyErr_Format(PyExc_TypeError, "%s() got two values for argument '%U'", name, key);
      return false;
    }
    out[first + i] = value;
    return true;
  }
  if (!has_kwargs) {
    PyErr_Format(PyExc_TypeError, "%s() has no argument '%U'", name, key);
    return false;
  }
  return PyDict_SetItem(more->ptr(), key, value) == 0;
}

bool Signature::assign(PyObject* const* given, Py_ssize_t positional, PyObject* keywords,
                       size_t count, handle* out, object* more) const {
  const size_t first = has_self ? 1 : 0;
  if (static_cast<size_t>(positional) > count - first) {
    PyErr_Format(PyExc_TypeError, "%s() takes %zu arguments, but %zd were given", name,
                 count - first, positional);
    return false;
  }
  for (Py_ssize_t i = 0; i < positional; ++i) out[first + static_cast<size_t>(i)] = given[i];
  if (has_kwargs) *more = dict();
  const Py_ssize_t words = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  for (Py_ssize_t i = 0; i < words; ++i) {
    PyObject* const key = PyTuple_GetItem(keywords, i);
    if (!assign_keyword(key, given[positional + i], first, count, out, more)) return false;
  }
  for (size_t i = first; i < count; ++i) {
    if (!out[i] && i - first < named.size()) out[i] = named[i - first].second;
    if (out[i]) continue;
    PyErr_Format(PyExc_TypeError, "%s() misses argument %s", name, parameter(i).c_str());
    return false;
  }
  return true;
}

void Signature::refuse(const cast_error& error, size_t i) const {
  PyErr_Format(PyExc_TypeError, "%s(): argument %s %s", name, parameter(i).c_str(), error.what());
}

}  // namespace headroom::python::bind
