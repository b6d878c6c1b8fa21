// Files on disk, written so that a reader, a full disk or a kill never leaves half a piece behind.
// Everything that the library and the program write goes through here. Names that they choose
// themselves inside a folder (GrowingFile, replace_file) hold regular files only: links, pipes and
// devices that somebody put there are refused, never followed. Only write_to() takes what a user
// named, such as /dev/stdout.
#ifndef HEADROOM_SRC_FILES_WRITE_H_
#define HEADROOM_SRC_FILES_WRITE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom::files {

/// A file that grows by whole pieces: add() writes all of its bytes or none. Locked against other
/// writers, in this process and others, as long as it lives. Errors are Error(kFile).
class GrowingFile {
 public:
  explicit GrowingFile(const std::string& path);  // what is there already stays
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  void add(std::string_view bytes);

  /// Drops all that comes after the first `size` bytes.
  void cut(int64_t size);

  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
};

/// Makes the folder and its parents.
void make_folders(const std::string& path);

enum class Sync : bool { kNo, kYes };

/// Puts a whole file, given in pieces, in the place of an old one in one go: a reader sees the one
/// or the other. With Sync::kYes so does one who looks after the power was lost, and the file is on
/// the disk when this returns. If it throws, the old file is as it was.
void replace_file(const std::string& path, const std::vector<std::string_view>& pieces,
                  Sync sync = Sync::kNo);

/// The same for a path that a user named: links are followed, and a device or pipe is written to
/// instead of replaced.
void write_to(const std::string& path, std::string_view bytes);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_WRITE_H_
