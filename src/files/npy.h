// The .npy header, with which every .npy file and every member of an .npz archive begins.
#ifndef HEADROOM_SRC_FILES_NPY_H_
#define HEADROOM_SRC_FILES_NPY_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "files/tensor_file.h"

namespace headroom::files {

/// Upper bound on the size of an accepted header, including magic, version and length.
constexpr size_t kLongestNpyHeader = 12 + 65535;

struct NpyHeader {
  std::string error;       // why the file is refused, as a predicate ("is truncated"); empty: valid
  size_t bytes = 0;        // size of the header; the elements follow it
  std::string descr;       // NumPy's name of the type, such as "<f4", or "structured"
  bool supported = false;  // whether elements of this type can be read
  Tensor tensor;           // dtype, byte order, shape and count; its location is left to the caller
};

/// The size of the header, computed from its first 12 bytes; 12 if `start` is shorter.
size_t npy_header_bytes(std::string_view start);

/// Parses a header. `start` holds at least the whole header, or all available bytes; `bytes` is the
/// size of header and elements together.
NpyHeader parse_npy(std::string_view start, uint64_t bytes, const OpenOptions& options);

/// A predicate that explains why a type cannot be read: "is of type '<i4', not of ...".
std::string unsupported_type(const std::string& descr);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_NPY_H_
