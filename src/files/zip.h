// Reads the table of contents of a zip archive, including zip64, and inflates members.
#ifndef HEADROOM_SRC_FILES_ZIP_H_
#define HEADROOM_SRC_FILES_ZIP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "files/file.h"

namespace headroom::files {

struct ZipMember {
  std::string name;
  bool deflated = false;  // otherwise stored without compression
  uint64_t offset = 0;    // of the first data byte in the file
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;  // uncompressed, as the archive claims
  uint32_t crc32 = 0;
};

/// The members in the order of the archive's central directory. Throws Error(kBadState) for
/// archives that are encrypted, split or compressed by another method than deflate, and for members
/// that overlap or lie outside the file.
std::vector<ZipMember> read_zip(const File& file);

/// Inflates a member and passes the result to `piece` in several calls, until `piece` returns false
/// or the member ends. Throws Error(kBadState) if the member turns out longer than it claims, or if
/// its length or CRC differ at its end.
void inflate_member(const File& file, const ZipMember& member,
                    const std::function<bool(const char* data, size_t bytes)>& piece);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_ZIP_H_
