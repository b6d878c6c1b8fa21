// A read-only file with positional reads. Reads use pread() instead of a memory map, so that a file
// truncated by another process results in an Error instead of a SIGBUS.
#ifndef HEADROOM_SRC_FILES_FILE_H_
#define HEADROOM_SRC_FILES_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace headroom::files {

/// Whether a path may be a symbolic link. Links are followed for paths given by the user, and
/// refused for file names that the library chose itself inside a folder.
enum class Links : bool { kRefused, kFollowed };

/// All reading functions are thread-safe. I/O failures throw Error(kFile); a file that is shorter
/// than expected throws Error(kBadState).
class File {
 public:
  /// Throws Error(kFile) unless the path is a readable regular file.
  explicit File(const std::string& path, Links links = Links::kFollowed);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // when the file was opened
  /// True if bytes [offset, offset + bytes) are inside the file. Does not overflow.
  bool holds(uint64_t offset, uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }
  /// Reads up to `bytes` bytes and returns how many were read; fewer only at the end of the file.
  /// Also reads data that was appended after the file was opened.
  size_t read_some(uint64_t offset, void* to, size_t bytes) const;
  /// Reads exactly `bytes` bytes.
  void read(uint64_t offset, void* to, size_t bytes) const;
  std::string read_text(uint64_t offset, size_t bytes) const;

  /// Throws Error(kBadState, "'path' sentence").
  [[noreturn]] void refuse(const std::string& sentence) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

/// Quotes untrusted text for an error message: at most 60 characters, with everything but printable
/// ASCII replaced by '?'.
std::string in_quotes(std::string_view text);

constexpr size_t kMostDimensions = 64;  // NumPy's limit

/// The number of elements of a shape; -1 if an extent is negative or the product exceeds `limit`.
/// A shape with an extent of 0 has no elements, however large its other extents are.
template <typename Shape>
int64_t element_count(const Shape& shape, int64_t limit) {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    if (extent < 0) return -1;
    if (extent == 0) count = 0;
  }
  for (const int64_t extent : shape) {
    if (count != 0 && extent > limit / count) return -1;
    count *= extent;
  }
  return count;
}

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_FILE_H_
