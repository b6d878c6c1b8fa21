#include "calls.h"

#include <headroom/ranges.h>

#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "bind/convert.h"

namespace headroom::python {
namespace {

using Names = std::set<std::string>;

Names words(const std::string& list) {
  std::istringstream stream(list);
  return {std::istream_iterator<std::string>(stream), {}};
}

CallKind kind_of(const std::string& name) {
  static const std::pair<CallKind, Names> kNames[] = {
      {CallKind::kShare,
       words("view view_as reshape reshape_as transpose permute swapaxes swapdims movedim moveaxis "
             "expand expand_as unsqueeze squeeze flatten unflatten ravel contiguous detach detach_ "
             "chunk split split_with_sizes tensor_split unbind narrow select __getitem__ t alias "
             "clone index_select gather repeat repeat_interleave flip roll diagonal unfold "
             "as_strided requires_grad_ pin_memory tanh sigmoid relu relu_ relu6 gelu silu mish "
             "hardswish rot90 take_along_dim topk sort")},
      {CallKind::kCast, words("to float half double bfloat16 type type_as cpu cuda")},
      {CallKind::kProduct, words("mul mul_ multiply __mul__ __rmul__ __imul__")},
      {CallKind::kQuotient, words("div div_ divide true_divide __div__ __truediv__ __itruediv__")},
      {CallKind::kSet, {"__setitem__"}}};
  if (fills_constants(name)) return CallKind::kFill;
  for (const auto& [kind, names] : kNames) {
    if (names.count(name) > 0) return kind;
  }
  return CallKind::kPlain;
}

Call describe_call(py::handle function) {
  static const Names kViews = words("T mT H mH data real");  // attributes
  static const std::map<std::string, std::string> kPlainNames = {{"__rdiv__", "div"},
                                                                 {"__rsub__", "sub"},
                                                                 {"__rpow__", "pow"},
                                                                 {"__rmod__", "remainder"},
                                                                 {"__rmatmul__", "matmul"}};
  const auto name_of = [](py::handle object) {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
    const py::object name = object.attr("__name__", type.attr("__name__"));
    return py::string_from(py::object::steal(PyObject_Str(name.ptr())));
  };
  std::string name = name_of(function);
  if (name == "__get__") {
    const bool view = kViews.count(name_of(function.attr("__self__"))) > 0;
    return {view ? CallKind::kShare : CallKind::kIgnore, name};
  }
  const CallKind kind = kind_of(name);
  const auto plain = kPlainNames.find(name);
  if (plain != kPlainNames.end()) return {kind, plain->second};
  const size_t begin = name.find_first_not_of('_');
  if (begin == std::string::npos) return {kind, name};
  return {kind, name.substr(begin, name.find_last_not_of('_') + 1 - begin)};
}

}  // namespace

// Looked up by equality: torch makes new objects for the same attribute.
const Call& call_of(py::handle function) {
  static auto& indices = *new py::dict;  // not destroyed: the interpreter may end before
  static std::deque<Call> calls;
  const py::handle known = PyDict_GetItemWithError(indices.ptr(), function.ptr());
  if (known) return calls[PyLong_AsSize_t(known.ptr())];
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  indices.set(function, calls.size());
  return calls.emplace_back(describe_call(function));
}

}  // namespace headroom::python
