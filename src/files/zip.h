// The table of contents of a zip archive, with zip64, and inflating of one member.
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
  bool deflated = false;  // or stored as it is
  uint64_t offset = 0;    // of its first byte in the file
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;  // after inflating, as the archive claims
  uint32_t crc32 = 0;
};

/// Members in the order of the archive's table. Refuses archives that are encrypted, split, packed
/// with anything but deflate, or whose members overlap or leave the file.
std::vector<ZipMember> read_zip(const File& file);

/// Inflates the member from its start and hands it over in pieces, until `piece` returns false or
/// all is done. In the end the length and the CRC have to be as claimed; a member that grows beyond
/// what it claims is stopped there.
void inflate_member(const File& file, const ZipMember& member,
                    const std::function<bool(const char* data, size_t bytes)>& piece);

}  // namespace headroom::files

#endif  // HEADROOM_SRC_FILES_ZIP_H_
