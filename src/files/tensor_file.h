// Tensors out of files, in streams: safetensors, .npy and .npz. files/ knows nothing of
// scaling. Files are not trusted: whatever they say is checked against their length before it is
// used, and memory does not grow with what they claim.
#ifndef HEADROOM_SRC_FILES_TENSOR_FILE_H_
#define HEADROOM_SRC_FILES_TENSOR_FILE_H_

#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "files/file.h"

namespace headroom::files {

/// One tensor of f16, bf16, f32 or f64 in a file.
struct Tensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t count = 0;
  bool packed = false;  // compressed: can only be read from its start

  // Where it is.
  uint64_t offset = 0;        // in the file
  uint64_t stored_bytes = 0;  // in the file
  uint64_t skip = 0;          // bytes before the first element, after unpacking
  uint32_t crc32 = 0;         // of all bytes, after unpacking; only if packed
  bool big_endian = false;
};

/// A tensor that is there, but of a type that is not read.
struct LeftOut {
  std::string name;
  std::string dtype;
};

/// Whether OpenOptions::bits16_are_bf16 would read what was left out for its type.
bool may_be_bf16(const std::string& dtype);

struct Contents {
  std::vector<Tensor> tensors;
  std::vector<LeftOut> left_out;
  std::map<std::string, std::string> metadata = {};  // of safetensors
};

// What safetensors allows.
constexpr uint64_t kLongestHeader = 100'000'000;
constexpr size_t kLongestName = 65535;  // as in zip archives

// Tensors and entries of metadata in one file; known models have fewer than 10^5 tensors in all
// their files together. A hundred bytes of a header become several hundred in memory, so 100 MB of
// short entries would take a gigabyte.
constexpr size_t kMostEntries = size_t{1} << 18;

struct OpenOptions {
  /// Take elements of 16 bits that are no floats to be bf16: NumPy has no bf16, so they are dumped
  /// as V2 (ml_dtypes, JAX) or as integers.
  bool bits16_are_bf16 = false;
};

/// `count` elements in host order, aligned; valid during the call only.
using Block = std::function<void(const void* data, int64_t count)>;

/// An open file whose table of contents has been read and checked. Throws headroom::Error, with the
/// path and the reason, for anything that is not as it should be.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path, const OpenOptions& options = {});

  const std::string& path() const { return file_.path(); }
  const std::vector<Tensor>& tensors() const { return contents_.tensors; }
  const std::vector<LeftOut>& left_out() const { return contents_.left_out; }

  /// Calls block() for elements [first, first + count) of a tensor, in order and in pieces. A
  /// packed tensor has to be read whole. Several threads may read at once.
  void read(const Tensor& tensor, int64_t first, int64_t count, const Block& block) const;

 private:
  File file_;
  Contents contents_;
};

// What TensorFile is made of: the table of contents of each format, and reading by it.
void read_elements(const File& file, const Tensor& tensor, int64_t first, int64_t count,
                   const Block& block);
Contents read_safetensors(const File& file, const OpenOptions& options);
Contents read_npy(const File& file, const OpenOptions& options);
Contents read_npz(const File& file, const OpenOptions& options);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_TENSOR_FILE_H_
