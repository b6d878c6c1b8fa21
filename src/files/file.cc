#include "files/file.h"

#include <fcntl.h>
#include <headroom/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace headroom::files {
namespace {

[[noreturn]] void cannot_read(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kFile, "'" + path + "' cannot be read: " + why + ".");
}

}  // namespace

File::File(const std::string& path, Links links) : path_(path) {
  // With O_NONBLOCK, opening a pipe without a writer does not block; the pipe is refused below.
  const int no_links = links == Links::kRefused ? O_NOFOLLOW : 0;
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | no_links);
  if (descriptor_ < 0 && errno == ELOOP && no_links != 0)
    cannot_read(path, "it is a symbolic link");
  if (descriptor_ < 0) cannot_read(path, std::strerror(errno));
  struct stat status {};
  const bool has_status = fstat(descriptor_, &status) == 0;
  if (!has_status || !S_ISREG(status.st_mode)) {
    const int error = errno;
    close(descriptor_);
    cannot_read(path, !has_status               ? std::strerror(error)
                      : S_ISDIR(status.st_mode) ? "it is a folder"
                                                : "it is not a regular file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

File::~File() { close(descriptor_); }

size_t File::read_some(uint64_t offset, void* to, size_t bytes) const {
  size_t read = 0;
  while (read < bytes) {
    const ssize_t got = pread(descriptor_, static_cast<char*>(to) + read, bytes - read,
                              static_cast<off_t>(offset + read));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) cannot_read(path_, std::strerror(errno));
    if (got == 0) break;
    read += static_cast<size_t>(got);
  }
  return read;
}

void File::read(uint64_t offset, void* to, size_t bytes) const {
  if (!holds(offset, bytes)) refuse("ends early: it is truncated.");
  if (read_some(offset, to, bytes) < bytes) refuse("was truncated while it was being read.");
}

std::string File::read_text(uint64_t offset, size_t bytes) const {
  // Checked before the allocation: `bytes` may come from an untrusted header.
  if (!holds(offset, bytes)) refuse("ends early: it is truncated.");
  std::string text(bytes, '\0');
  read(offset, text.data(), bytes);
  return text;
}

void File::refuse(const std::string& sentence) const {
  throw Error(ErrorCode::kBadState, "'" + path_ + "' " + sentence);
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string shown;
  for (const char c : text.substr(0, kLongest)) shown += c >= ' ' && c < 127 ? c : '?';
  return "'" + shown + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace headroom::files
