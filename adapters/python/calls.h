// What functions of the torch API do to the range of their arguments, by their names.
#ifndef HEADROOM_ADAPTERS_PYTHON_CALLS_H_
#define HEADROOM_ADAPTERS_PYTHON_CALLS_H_

#include <string>

#include "bind/object.h"

namespace headroom::python {

namespace py = bind;

/// What the result of a call is. No element of a shared result can be the first to leave the range:
/// it has the row of the first argument.
enum class CallKind {
  kShare,     // elements of the first argument, or smaller ones
  kCast,      // shared if the new type has the range of the old one
  kProduct,   // shared if the factor is a constant of at most 1
  kQuotient,  // shared if the divisor is a constant of at least 1
  kFill,      // constants, which may be infinite on purpose
  kSet,       // the first argument, which was written to
  kIgnore,    // nothing that was computed
  kPlain,
};

/// A function of the torch API.
struct Call {
  CallKind kind;
  std::string name;  // in reports
};

/// Functions are described when they are first seen. The reference stays valid.
const Call& call_of(py::handle function);

}  // namespace headroom::python

#endif  // HEADROOM_ADAPTERS_PYTHON_CALLS_H_
