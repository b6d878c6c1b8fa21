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

// False, with errno, if not everything could be written.
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
  return error == ENOSPC ? "could not be written to its end: the disk is full"
                         : std::string("could not be written: ") + std::strerror(error);
}

// What stands at `path` if that is anything but a regular file, else nothing. Does not follow
// links.
const char* other_than_file(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return nullptr;
  if (S_ISLNK(status.st_mode)) return "a symbolic link";
  if (S_ISDIR(status.st_mode)) return "a folder";
  return S_ISFIFO(status.st_mode) ? "a pipe" : "a device or socket";
}

// A name that the library chose itself holds a regular file or nothing. Whoever may write to the
// folder could have put a link there, which would lead to any file of the user who runs this.
void check_own_name(const std::string& path) {
  const char* const other = other_than_file(path);
  if (other == nullptr) return;
  fail(path, std::string("could not be written: it is ") + other +
                 ", not a regular file; remove it, or choose another folder");
}

// So that the new name is on the disk too. A file system that cannot do that needs it not.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const int folder =
      ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

// A new file beside `path`, under a name that nobody can guess and that nothing has; -1 with errno
// if there can be none. Ends in ".tmp", by which the leftovers of killed processes are found.
int open_new_file(const std::string& path, std::string* name) {
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

// Writes all pieces and closes the file; 0, or the error number of what failed first.
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
  std::string unfinished;
  const int file = open_new_file(path, &unfinished);
  if (file < 0) fail(path, reason(errno));
  int error = write_and_close(file, pieces, sync);
  if (error == 0 && std::rename(unfinished.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(unfinished.c_str());
    fail(path, reason(error));
  }
  if (sync == Sync::kYes) sync_folder_of(path);
}

}  // namespace

GrowingFile::GrowingFile(const std::string& path) : path_(path) {
  check_own_name(path);
  // What came there since is neither followed nor waited for.
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
    if (::ftruncate(file_, size_) != 0) errno = error;  // the piece stays cut; readers expect that
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
                "The folder '" + path + "' cannot be made: " + error.message() + ".");
  }
}

void replace_file(const std::string& path, const std::vector<std::string_view>& pieces, Sync sync) {
  check_own_name(path);  // rename() would not follow a link, but neither is it ours to remove
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
  // Beside the file that a link leads to, not beside the link: that may be in /dev or /proc.
  const bool linked = std::filesystem::exists(status) && other_than_file(path) != nullptr;
  const std::string target = linked ? std::filesystem::canonical(path, error).string() : path;
  if (linked && error) fail(path, "could not be written: " + error.message());
  replace(target, {bytes}, Sync::kNo);
}

}  // namespace headroom::files
