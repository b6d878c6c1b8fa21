#include "files/write.h"

#include <fcntl.h>
#include <headroom/error.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>

namespace headroom::files {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kFile, "'" + path + "' " + what + ".");
}

// Returns false and sets errno if not all bytes could be written.
bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

std::string reason(int error) {
  return error == ENOSPC ? "could not be written completely: the disk is full"
                         : std::string("could not be written: ") + std::strerror(error);
}

// Describes what is at `path` if it is not a regular file; null if it is one or does not exist.
// Does not follow links.
const char* irregular_file_at(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return nullptr;
  if (S_ISLNK(status.st_mode)) return "a symbolic link";
  if (S_ISDIR(status.st_mode)) return "a folder";
  return S_ISFIFO(status.st_mode) ? "a pipe" : "a device or socket";
}

// Following a link at a name that the library chose would let anyone with write access to the
// folder overwrite any file of the user who runs this process.
void refuse_irregular_file(const std::string& path) {
  const char* const found = irregular_file_at(path);
  if (found == nullptr) return;
  fail(path, std::string("could not be written: it is ") + found +
                 ", not a regular file; remove it, or choose another folder");
}

// Makes a rename durable. Errors are ignored: a file system that cannot sync folders does not need
// it.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const int folder =
      ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

// Creates a file next to `path` under an unpredictable new name; returns -1 and sets errno on
// failure. The name ends in ".tmp", by which leftovers of killed processes are recognised.
int open_temporary_file(const std::string& path, std::string* name) {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    char digits[16];
    std::snprintf(digits, sizeof digits, ".%08x.tmp", random());
    *name = path + digits;
    constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const int file = ::open(name->c_str(), kFlags, 0666);
    if (file >= 0 || errno != EEXIST) return file;
  }
  return -1;
}

// Writes all pieces and closes the file. Returns 0 or the errno of the first failure.
int write_and_close(int file, const std::vector<std::string_view>& pieces, Sync sync) {
  int error = 0;
  for (const std::string_view piece : pieces) {
    if (error == 0 && !write_all(file, piece)) error = errno;
  }
  if (error == 0 && sync == Sync::kYes && ::fsync(file) != 0) error = errno;
  if (::close(file) != 0 && error == 0) error = errno;
  return error;
}

void replace(const std::string& path, const std::vector<std::string_view>& pieces, Sync sync) {
  std::string temporary;
  const int file = open_temporary_file(path, &temporary);
  if (file < 0) fail(path, reason(errno));
  int error = write_and_close(file, pieces, sync);
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail(path, reason(error));
  }
  if (sync == Sync::kYes) sync_folder_of(path);
}

}  // namespace

GrowingFile::GrowingFile(const std::string& path) : path_(path) {
  refuse_irregular_file(path);
  // A link or pipe that appeared after the check is not followed (O_NOFOLLOW) and does not block
  // (O_NONBLOCK).
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  file_ = ::open(path.c_str(), kFlags, 0666);
  if (file_ < 0) fail(path, reason(errno));
  struct stat status {};
  if (::fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file_);
    fail(path, "could not be written: it is not a regular file");
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(file_);
    fail(path, error == EWOULDBLOCK ? "is being written by another run; choose another folder"
                                    : reason(error));
  }
  size_ = std::max<int64_t>(0, ::lseek(file_, 0, SEEK_END));
}

GrowingFile::~GrowingFile() { ::close(file_); }

void GrowingFile::add(std::string_view bytes) {
  if (!write_all(file_, bytes)) {
    const int error = errno;
    // If the truncation fails too, a partial line remains; readers of histories ignore it.
    [[maybe_unused]] const int ignored = ::ftruncate(file_, size_);
    fail(path_, reason(error));
  }
  size_ += static_cast<int64_t>(bytes.size());
}

void GrowingFile::cut(int64_t size) {
  if (::ftruncate(file_, size) != 0) fail(path_, reason(errno));
  size_ = size;
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    throw Error(ErrorCode::kFile,
                "The folder '" + path + "' cannot be created: " + error.message() + ".");
  }
}

void replace_file(const std::string& path, const std::vector<std::string_view>& pieces, Sync sync) {
  refuse_irregular_file(path);  // rename() would remove the link, which is not ours
  replace(path, pieces, sync);
}

void write_to(const std::string& path, std::string_view bytes) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file < 0) fail(path, reason(errno));
    const int failed = write_and_close(file, {bytes}, Sync::kNo);
    if (failed != 0) fail(path, reason(failed));
    return;
  }
  // The temporary file goes next to the link's target: the link may be in /dev or /proc.
  const bool linked = std::filesystem::exists(status) && irregular_file_at(path) != nullptr;
  const std::string target = linked ? std::filesystem::canonical(path, error).string() : path;
  if (linked && error) fail(path, "could not be written: " + error.message());
  replace(target, {bytes}, Sync::kNo);
}

}  // namespace headroom::files
