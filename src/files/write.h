// Crash-safe file output: neither a full disk nor a killed process leaves partial data behind. The
// library and the program write all their files through this header.
//
// GrowingFile and replace_file() are for names that the library chose inside a folder. They accept
// regular files only: a symbolic link, pipe or device at that name is refused, because anyone with
// write access to the folder could have put it there. write_to() is for paths given by the user,
// such as /dev/stdout.
#ifndef HEADROOM_SRC_FILES_WRITE_H_
#define HEADROOM_SRC_FILES_WRITE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom::files {

/// An append-only file. add() writes all of its bytes or none. An exclusive lock (flock) keeps
/// other writers out, in this process and in others, until the object is destroyed. Throws
/// Error(kFile).
class GrowingFile {
 public:
  explicit GrowingFile(const std::string& path);  // keeps the existing contents
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  void add(std::string_view bytes);

  /// Truncates the file to `size` bytes.
  void cut(int64_t size);

  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
};

/// Creates the folder and its parents. Throws Error(kFile).
void make_folders(const std::string& path);

enum class Sync : bool { kNo, kYes };

/// Replaces a file atomically by the concatenation of `pieces`: readers see either the old or the
/// new contents. Sync::kYes extends this to a power failure: the file is synced to the disk before
/// the function returns. Throws Error(kFile) and leaves the old file unchanged.
void replace_file(const std::string& path, const std::vector<std::string_view>& pieces,
                  Sync sync = Sync::kNo);

/// replace_file() for a path given by the user: follows links, and writes to a device or pipe
/// instead of replacing it.
void write_to(const std::string& path, std::string_view bytes);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_WRITE_H_
