// Calls from Python to C++. The function of a binding is a type without data (a lambda that
// captures nothing, or fn<&f>), so that each has a C entry point of its own, which CPython calls
// with an array of arguments.
#ifndef HEADROOM_ADAPTERS_PYTHON_BIND_FUNCTION_H_
#define HEADROOM_ADAPTERS_PYTHON_BIND_FUNCTION_H_

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/convert.h"

namespace headroom::python::bind {

/// fn<&f> for a function, a method or a data member, as a type without data. Methods and members
/// take the object first.
template <auto f, typename = decltype(f)>
struct Function;
template <auto f, typename R, typename... A>
struct Function<f, R (*)(A...)> {
  R operator()(A... arguments) const { return f(std::forward<A>(arguments)...); }
};
template <auto f, typename R, typename C, typename... A>
struct Function<f, R (C::*)(A...)> {
  R operator()(C& self, A... arguments) const { return (self.*f)(std::forward<A>(arguments)...); }
};
template <auto f, typename R, typename C, typename... A>
struct Function<f, R (C::*)(A...) const> {
  R operator()(const C& self, A... arguments) const {
    return (self.*f)(std::forward<A>(arguments)...);
  }
};
template <auto f, typename M, typename C>
struct Function<f, M C::*> {
  const M& operator()(const C& self) const { return self.*f; }
};
template <auto f>
inline constexpr Function<f> fn{};

/// Result and parameters of a function type.
template <typename F>
struct Traits : Traits<decltype(&F::operator())> {};
template <typename R, typename C, typename... A>
struct Traits<R (C::*)(A...) const> {
  using Result = R;
  using Parameters = std::tuple<A...>;
};

/// A parameter that can be named in calls: arg("stream") = 0 has a default.
class arg {
 public:
  explicit arg(const char* name) : name_(name) {}
  template <typename T>
  arg operator=(const T& value) const {  // NOLINT(misc-unconventional-assign-operator)
    arg other = *this;
    other.default_ = to_python(value);
    return other;
  }
  const char* name() const { return name_; }
  const object& default_value() const { return default_; }

 private:
  const char* name_;
  object default_;
};

/// What a call needs besides the function.
struct Signature {
  const char* name = nullptr;
  std::string doc;
  bool has_self = false;
  bool has_kwargs = false;
  std::vector<std::pair<object, object>> named;  // name and default (or null), without self

  void add(const arg& argument);
  void add(const char* text) { doc = text; }
  /// Puts the parameters before the documentation, in the form that inspect.signature() reads.
  void document();

  /// Assigns the arguments of a call to `count` parameters. `more` receives the other keywords.
  /// Raises TypeError and returns false if they do not fit.
  bool assign(PyObject* const* given, Py_ssize_t positional, PyObject* keywords, size_t count,
              handle* out, object* more) const;
  /// Raises TypeError for parameter `i`.
  void refuse(const cast_error& error, size_t i) const;

 private:
  std::string parameter(size_t i) const;
  bool assign_keyword(PyObject* name, PyObject* value, size_t first, size_t count, handle* out,
                      object* more) const;
};

/// The entry point of one function. `kSelf`: a method, whose first parameter is the object.
template <typename F, bool kSelf>
class Entry {
 public:
  template <typename... Extra>
  static PyMethodDef* define(const char* name, const Extra&... extra) {
    if (signature != nullptr) throw type_error(std::string(name) + " is bound twice");
    signature = new Signature;
    signature->name = name;
    signature->has_self = kSelf;
    signature->has_kwargs = kKwargs;
    (signature->add(extra), ...);
    definition.ml_name = name;
    signature->document();
    definition.ml_doc = signature->doc.c_str();
    return &definition;
  }

 private:
  using Parameters = typename Traits<F>::Parameters;
  static constexpr size_t kAll = std::tuple_size_v<Parameters>;
  template <size_t i>
  using Parameter = std::tuple_element_t<i, Parameters>;
  static constexpr bool last_is_kwargs() {
    if constexpr (kAll == 0) {
      return false;
    } else {
      return std::is_same_v<std::decay_t<Parameter<kAll - 1>>, kwargs>;
    }
  }
  static constexpr bool kKwargs = last_is_kwargs();
  static constexpr size_t kCount = kAll - (kKwargs ? 1 : 0);

  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t positional,
                        PyObject* keywords) {
    std::array<handle, kAll + 1> values;
    size_t current = 0;
    try {
      object more;
      if (kSelf) values[0] = self;
      if (!signature->assign(given, positional, keywords, kCount, values.data(), &more)) {
        return nullptr;
      }
      if constexpr (kKwargs) values[kAll - 1] = more;
      return invoke(values, current, std::make_index_sequence<kAll>());
    } catch (const ArgumentError& error) {
      signature->refuse(error.error, current);
    } catch (const cast_error& error) {
      PyErr_Format(PyExc_TypeError, "%s(): a value %s", signature->name, error.what());
    } catch (...) {
      raise_current_exception();
    }
    return nullptr;
  }

  // Separates a refused argument from a cast_error of the function itself.
  struct ArgumentError {
    cast_error error;
  };
  template <size_t i>
  static decltype(auto) load(handle from, size_t* current) {
    try {
      *current = i;
      return Converter<Parameter<i>>::from(from);
    } catch (const cast_error& error) {
      throw ArgumentError{error};
    }
  }

  template <size_t... I>
  static PyObject* invoke(const std::array<handle, kAll + 1>& values, size_t& current,
                          std::index_sequence<I...>) {
    if constexpr (std::is_void_v<typename Traits<F>::Result>) {
      F{}(load<I>(values[I], &current)...);
      return none().release();
    } else {
      return to_python(F{}(load<I>(values[I], &current)...)).release();
    }
  }

  // Never destroyed: the interpreter, whose objects it holds, ends first.
  static inline Signature* signature = nullptr;
  static inline PyMethodDef definition = {
      nullptr, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
      METH_FASTCALL | METH_KEYWORDS, nullptr};
};

/// A module under construction: m.def("name", function, arg("x") = 0, "documentation").
class module_ : public object {
 public:
  explicit module_(object from) : object(std::move(from)) {}
  template <typename T>
  void add(const char* name, const T& value) {
    check(PyModule_AddObjectRef(ptr(), name, to_python(value).ptr()));
  }
  template <typename F, typename... Extra>
  module_& def(const char* name, F, const Extra&... extra) {
    PyMethodDef* const definition = Entry<F, false>::define(name, extra...);
    const object of = attr("__name__");
    add(name, object::steal(PyCFunction_NewEx(definition, nullptr, of.ptr())));
    return *this;
  }
};

}  // namespace headroom::python::bind

#endif  // HEADROOM_ADAPTERS_PYTHON_BIND_FUNCTION_H_
