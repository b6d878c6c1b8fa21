// files/: reads tensors from safetensors, .npy and .npz files, and writes files crash-safely
// (write.h). It must not know about scaling, training or reports.
//
// Files are untrusted input. Every size and offset in a header is checked against the length of the
// file before it is used, and memory use does not depend on sizes that a file merely claims.
#ifndef HEADROOM_SRC_FILES_TENSOR_FILE_H_
#define HEADROOM_SRC_FILES_TENSOR_FILE_H_

#include <headroom/tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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
  bool packed = false;  // compressed: can only be read from the start

  // Location in the file.
  uint64_t offset = 0;
  uint64_t stored_bytes = 0;
  uint64_t skip = 0;   // if packed: bytes before the first element, after decompression
  uint32_t crc32 = 0;  // if packed: of all bytes, after decompression
  bool big_endian = false;
};

/// A tensor in the file whose type is not supported.
struct LeftOut {
  std::string name;
  std::string dtype;
  int64_t count = 0;  // of elements; 0 if the file does not say it
};

/// Whether OpenOptions::bits16_are_bf16 makes this otherwise unsupported type readable.
bool may_be_bf16(const std::string& dtype);

struct Contents {
  std::vector<Tensor> tensors;
  std::vector<LeftOut> left_out;
  std::map<std::string, std::string> metadata = {};  // safetensors only
};

constexpr uint64_t kLongestHeader = 100'000'000;  // bytes; the limit of safetensors
constexpr size_t kLongestName = 65535;            // bytes; the limit of zip archives

// Maximum number of tensors and metadata entries in one file. Known models have fewer than 10^5
// tensors in all their files together. The limit bounds memory use: 100 MB of short header entries
// would need more than a gigabyte once parsed.
constexpr size_t kMostEntries = size_t{1} << 18;

struct OpenOptions {
  /// Interpret 16-bit integers and NumPy's V2 as bf16. NumPy has no bf16, so bf16 tensors are saved
  /// as V2 (ml_dtypes, JAX) or as integers.
  bool bits16_are_bf16 = false;
};

/// Receives `count` elements in host byte order, aligned to 64 bytes, valid during the call only.
using Block = std::function<void(const void* data, int64_t count)>;

/// Small enough to stay in the L2 cache until the callback has processed it.
constexpr size_t kBlockBytes = size_t{1} << 18;

struct AlignedDelete {
  void operator()(char* p) const;
};
using BlockBuffer = std::unique_ptr<char, AlignedDelete>;
BlockBuffer make_block_buffer();

/// Reverses the bytes of every element of `size` bytes.
void swap_bytes(char* data, size_t bytes, size_t size);

/// read_elements() for tensors that are not packed.
void read_plain(const File& file, const Tensor& tensor, int64_t first, int64_t count,
                const Block& block);

/// Passes elements [first, first + count) of a tensor to block(), in order and in several calls. A
/// packed tensor must be read as a whole. Thread-safe.
void read_elements(const File& file, const Tensor& tensor, int64_t first, int64_t count,
                   const Block& block);

/// The table of contents of each format.
Contents read_safetensors(const File& file, const OpenOptions& options);
Contents read_npy(const File& file, const OpenOptions& options);
Contents read_npz(const File& file, const OpenOptions& options);

/// An open file whose table of contents has been read and validated. Throws Error(kFile) if the
/// file cannot be read and Error(kBadState) if it is invalid; both name the path and the reason.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path, const OpenOptions& options = {});

  const std::string& path() const { return file_.path(); }
  const std::vector<Tensor>& tensors() const { return contents_.tensors; }
  const std::vector<LeftOut>& left_out() const { return contents_.left_out; }

  /// See read_elements().
  void read(const Tensor& tensor, int64_t first, int64_t count, const Block& block) const {
    read_elements(file_, tensor, first, count, block);
  }

 private:
  File file_;
  Contents contents_;
};

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_TENSOR_FILE_H_
