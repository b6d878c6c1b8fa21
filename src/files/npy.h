// The header of .npy, which is also what every member of an .npz begins with.
#ifndef HEADROOM_SRC_FILES_NPY_H_
#define HEADROOM_SRC_FILES_NPY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/tensor_file.h"

namespace headroom::files {

/// Enough bytes from the start of the file for any header that is accepted.
constexpr size_t kLongestNpyHeader = 12 + 65535;

struct NpyHeader {
  std::string wrong;  // why it is refused, as the end of a sentence; empty if it is not
  size_t bytes = 0;   // of the header: elements begin here
  std::string descr;  // NumPy's name of the type, such as <f4, or "structured"
  bool is_read = false;
  DType dtype = DType::kF32;
  bool big_endian = false;
  std::vector<int64_t> shape;
  int64_t count = 0;
};

/// How long the header is, as far as its first bytes tell; 12 if they are fewer than that.
size_t npy_header_bytes(std::string_view start);

/// `start`: at least the header, or all there is. `bytes`: how many there are in all, header and
/// elements.
NpyHeader parse_npy(std::string_view start, uint64_t bytes, const OpenOptions& options);

/// What to say of a type that is not read: "is of type <i4, ..."
std::string unread_type(const std::string& descr);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_NPY_H_
