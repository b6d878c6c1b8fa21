// Values of C++ to and from Python. Converter<T>::from() throws cast_error for a value of another
// type.
#ifndef HEADROOM_ADAPTERS_PYTHON_BIND_CONVERT_H_
#define HEADROOM_ADAPTERS_PYTHON_BIND_CONVERT_H_

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bind/object.h"

namespace headroom::python::bind {

/// Owns a reference that may be dropped in any thread, with or without the interpreter lock.
std::shared_ptr<void> hold(object owner);

// Conversions of numbers and text, for the templates below. They throw cast_error.
int64_t signed_from(handle from);
uint64_t unsigned_from(handle from);
double double_from(handle from);
bool bool_from(handle from);
std::string string_from(handle from);
/// The items of anything with a length and items, but no text.
tuple items_of(handle from);
[[noreturn]] void refuse(const char* wanted, handle found);

/// An instance of a bound class. `owner` is empty until __init__ has run.
struct Instance {
  PyObject_HEAD;
  std::shared_ptr<void> owner;  // of T; a pointer to a base class has the same value
  PyObject* attributes;         // __dict__, of classes that have one
  PyObject* weak_references;
};

/// The Python class of T; null until it is bound.
template <typename T>
inline PyTypeObject* type_of = nullptr;

/// The instance behind `from`, whose class must be `type` or derive from it.
Instance& instance_of(handle from, PyTypeObject* type);
object new_instance(PyTypeObject* type, std::shared_ptr<void> owner);

/// Whether `from` is an instance of the class of T or of one that derives from it.
template <typename T>
bool is_instance(handle from) {
  return type_of<T> != nullptr && PyObject_TypeCheck(from.ptr(), type_of<T>) != 0;
}

/// Every type without a specialisation below is a bound class; it is passed and returned as a copy.
template <typename T>
struct Converter {
  static T& from(handle from) {
    return *static_cast<T*>(instance_of(from, type_of<T>).owner.get());
  }
  static object to(T value) {
    return new_instance(type_of<T>, std::make_shared<T>(std::move(value)));
  }
};
template <typename T>
struct Converter<const T> : Converter<T> {};
template <typename T>
struct Converter<T&> : Converter<std::remove_const_t<T>> {};
template <typename T>
struct Converter<T&&> : Converter<T> {};

template <typename T>
object to_python(const T& value) {
  return Converter<T>::to(value);
}
inline object to_python(const char* text) {
  return text == nullptr ? none() : object::steal(PyUnicode_FromString(text));
}

template <std::signed_integral T>
struct Converter<T> {
  static T from(handle from) {
    const int64_t value = signed_from(from);
    if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
      refuse("int of this size", from);
    }
    return static_cast<T>(value);
  }
  static object to(T value) { return object::steal(PyLong_FromLongLong(value)); }
};
template <std::unsigned_integral T>
struct Converter<T> {
  static T from(handle from) {
    const uint64_t value = unsigned_from(from);
    if (value > std::numeric_limits<T>::max()) refuse("int of this size", from);
    return static_cast<T>(value);
  }
  static object to(T value) { return object::steal(PyLong_FromUnsignedLongLong(value)); }
};
template <>
struct Converter<bool> {
  static bool from(handle from) { return bool_from(from); }
  static object to(bool value) { return object::borrow(value ? Py_True : Py_False); }
};
template <std::floating_point T>
struct Converter<T> {
  static T from(handle from) { return static_cast<T>(double_from(from)); }
  static object to(T value) { return object::steal(PyFloat_FromDouble(value)); }
};
template <>
struct Converter<std::string> {
  static std::string from(handle from) { return string_from(from); }
  static object to(const std::string& value) {
    return object::steal(
        PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
  }
};
template <>
struct Converter<std::string_view> : Converter<std::string> {};  // the string lives during the call
template <>
struct Converter<const char*> {
  static object to(const char* value) { return to_python(value); }
};

template <>
struct Converter<handle> {
  static handle from(handle from) { return from; }
  static object to(handle value) { return object::borrow(value); }
};
template <>
struct Converter<object> {
  static object from(handle from) { return object::borrow(from); }
  static object to(const object& value) { return value; }
};
template <std::derived_from<object> T>
struct Converter<T> {
  static T from(handle from) {
    if (std::is_same_v<T, tuple> && PyTuple_Check(from.ptr()) == 0) refuse("tuple", from);
    if (std::is_same_v<T, list> && PyList_Check(from.ptr()) == 0) refuse("list", from);
    if (std::is_base_of_v<dict, T> && PyDict_Check(from.ptr()) == 0) refuse("dict", from);
    if (std::is_same_v<T, type> && PyType_Check(from.ptr()) == 0) refuse("type", from);
    if (std::is_same_v<T, capsule> && !PyCapsule_CheckExact(from.ptr())) refuse("capsule", from);
    return T(object::borrow(from));
  }
  static object to(const T& value) { return value; }
};

template <typename... T>
tuple make_tuple(const T&... values) {
  tuple made(sizeof...(T));
  Py_ssize_t place = 0;
  (check(PyTuple_SetItem(made.ptr(), place++, to_python(values).release())), ...);
  return made;
}

template <typename T>
struct Converter<std::optional<T>> {
  static std::optional<T> from(handle from) {
    if (from.is_none()) return std::nullopt;
    return Converter<T>::from(from);
  }
  static object to(const std::optional<T>& value) {
    return value.has_value() ? to_python(*value) : none();
  }
};
template <typename T>
struct Converter<std::vector<T>> {
  static std::vector<T> from(handle from) {
    const tuple items = items_of(from);
    std::vector<T> values;
    values.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) values.push_back(Converter<T>::from(items[i]));
    return values;
  }
  static object to(const std::vector<T>& values) {
    list made;
    for (const T& value : values) made.append(value);
    return made;
  }
};
template <typename... T>
struct Converter<std::tuple<T...>> {
  static std::tuple<T...> from(handle from) {
    const tuple items = items_of(from);
    if (items.size() != sizeof...(T)) refuse("tuple of this size", from);
    return fields(items, std::index_sequence_for<T...>());
  }
  static object to(const std::tuple<T...>& values) {
    return std::apply([](const T&... all) { return make_tuple(all...); }, values);
  }

 private:
  template <size_t... I>
  static std::tuple<T...> fields(const tuple& items, std::index_sequence<I...>) {
    return {Converter<T>::from(items[I])...};
  }
};
template <typename A, typename B>
struct Converter<std::pair<A, B>> {
  static std::pair<A, B> from(handle from) {
    auto [a, b] = Converter<std::tuple<A, B>>::from(from);
    return {std::move(a), std::move(b)};
  }
  static object to(const std::pair<A, B>& values) {
    return make_tuple(values.first, values.second);
  }
};

/// Shares ownership with the Python object.
template <typename T>
struct Converter<std::shared_ptr<T>> {
  static std::shared_ptr<T> from(handle from) {
    return std::static_pointer_cast<T>(instance_of(from, type_of<T>).owner);
  }
};

/// A Python function, or None. It acquires the interpreter lock in every call.
template <typename... Arguments>
struct Converter<std::function<void(Arguments...)>> {
  static std::function<void(Arguments...)> from(handle from) {
    if (from.is_none()) return nullptr;
    if (PyCallable_Check(from.ptr()) == 0) refuse("function or None", from);
    return [function = hold(object::borrow(from))](Arguments... arguments) {
      const gil_scoped_acquire lock;
      handle(static_cast<PyObject*>(function.get()))(arguments...);
    };
  }
};

template <typename... Arguments>
object handle::operator()(const Arguments&... arguments) const {
  return object::steal(PyObject_CallObject(ptr(), make_tuple(arguments...).ptr()));
}

template <typename T>
void list::append(const T& value) {
  check(PyList_Append(ptr(), to_python(value).ptr()));
}

template <typename Key, typename Value>
void dict::set(const Key& key, const Value& value) {
  check(PyDict_SetItem(ptr(), to_python(key).ptr(), to_python(value).ptr()));
}

}  // namespace headroom::python::bind

#endif  // HEADROOM_ADAPTERS_PYTHON_BIND_CONVERT_H_
