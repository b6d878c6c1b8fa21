#include "files/write.h"

#include <fcntl.h>
#include <headroom/error.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

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

// So that the new name is on the disk too. A file system that cannot do that needs it not.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const int folder =
      ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

}  // namespace

GrowingFile::GrowingFile(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) fail(path, reason(errno));
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
  // Devices such as /dev/null cannot be cut, and need not be.
  if (::ftruncate(file_, size) != 0 && errno != EINVAL) fail(path_, reason(errno));
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
  // A device or pipe, such as /dev/stdout, is written to and not replaced.
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  const bool in_place =
      std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
  const std::string target = in_place ? path : path + "." + std::to_string(::getpid()) + ".tmp";
  const int file = ::open(target.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail(path, reason(errno));
  bool done = true;
  int error = 0;
  const auto attempt = [&](bool ok) {
    if (ok || !done) return;
    done = false;
    error = errno;
  };
  for (const std::string_view piece : pieces) {
    if (done) attempt(write_all(file, piece));
  }
  if (done && sync == Sync::kYes) attempt(::fsync(file) == 0);
  attempt(::close(file) == 0);
  if (done && !in_place) attempt(std::rename(target.c_str(), path.c_str()) == 0);
  if (!done) {
    if (!in_place) ::unlink(target.c_str());
    fail(path, reason(error));
  }
  if (sync == Sync::kYes) sync_folder_of(path);
}

}  // namespace headroom::files
