// A file on disk, read at any place by any thread. Not mapped: a file that another program cuts
// short is an error here, and would be a SIGBUS there.
#ifndef HEADROOM_SRC_FILES_FILE_H_
#define HEADROOM_SRC_FILES_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace headroom::files {

/// Whether a path may be a symbolic link: what a user named may be, a name that the library itself
/// chose in a folder may not.
enum class Links : bool { kRefused, kFollowed };

class File {
 public:
  explicit File(const std::string& path, Links links = Links::kFollowed);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  /// True if bytes [offset, offset + bytes) are inside the file.
  bool holds(uint64_t offset, uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset;
  }
  /// Reads `bytes`, or fewer where the file ends; returns how many. Sees what was added to the file
  /// since it was opened.
  size_t read_some(uint64_t offset, void* to, size_t bytes) const;
  /// Reads exactly `bytes`; throws if the file ends before.
  void read(uint64_t offset, void* to, size_t bytes) const;
  std::string read_text(uint64_t offset, size_t bytes) const;

  /// Throws Error(kBadState, "'path' sentence").
  [[noreturn]] void refuse(const std::string& sentence) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

/// A name or value out of a file, in quotes, short, and without control characters.
std::string in_quotes(std::string_view text);

constexpr size_t kMostDimensions = 64;  // as in NumPy

/// The product of the shape; -1 if it is negative or more than `limit`.
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
