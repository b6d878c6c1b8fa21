#ifndef HEADROOM_SRC_RECORD_FILE_H_
#define HEADROOM_SRC_RECORD_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace headroom::internal {

/// A file that grows by whole pieces: add() writes all of its bytes or none. Locked against other
/// writers, in this process and others, as long as it lives. Errors are Error(kFile).
class GrowingFile {
 public:
  explicit GrowingFile(const std::string& path);  // empties the file
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  void add(std::string_view bytes);

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
};

/// Makes the folder and its parents.
void make_folders(const std::string& path);

/// Puts a whole file in the place of an old one in one go: a reader sees the one or the other.
void replace_file(const std::string& path, std::string_view bytes);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_FILE_H_
