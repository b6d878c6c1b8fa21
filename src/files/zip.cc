#include "files/zip.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "files/tensor_file.h"

namespace headroom::files {
namespace {

// Sizes of the fixed parts of zip records, from PKWARE's APPNOTE.TXT. An archive ends with its
// central directory (here: the table), then an end record that locates it. With zip64, a locator
// before the end record locates a larger end record.
constexpr size_t kEndBytes = 22;
constexpr size_t kLocatorBytes = 20;
constexpr size_t kEnd64Bytes = 56;
constexpr size_t kCentralBytes = 46;  // an entry of the table
constexpr size_t kLocalBytes = 30;    // the header in front of a member's data
constexpr size_t kLongestComment = 65535;
constexpr uint64_t kLongestTable = 100'000'000;
constexpr size_t kPieceBytes = size_t{1} << 18;
constexpr size_t kFirstPieceBytes = 4096;  // small, for callers that only want a header

/// The little-endian fields of a record. The caller checks that the record is long enough.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}
  uint64_t at(size_t offset, size_t size) const {
    uint64_t value = 0;
    std::memcpy(&value, bytes_.data() + offset, size);
    return value;
  }
  uint32_t signature() const { return static_cast<uint32_t>(at(0, 4)); }

 private:
  std::string_view bytes_;
};

/// The central directory.
struct Table {
  uint64_t members;
  uint64_t offset;
  uint64_t bytes;
};

[[noreturn]] void damaged(const File& file, const std::string& what) {
  file.refuse("is a damaged or truncated zip archive: " + what + ".");
}

/// Locates the table through the last end record in the file.
Table find_table(const File& file) {
  const uint64_t tail_bytes = std::min<uint64_t>(file.size(), kEndBytes + kLongestComment);
  const uint64_t tail_offset = file.size() - tail_bytes;
  const std::string tail = file.read_text(tail_offset, tail_bytes);
  const size_t found = tail.rfind("PK\x05\x06");
  if (found == std::string::npos || tail.size() - found < kEndBytes) {
    damaged(file, "its table of contents is missing");
  }
  const Fields end(std::string_view(tail).substr(found));
  if (end.at(4, 2) != 0 || end.at(6, 2) != 0) file.refuse("is one part of a split zip archive.");
  Table table = {end.at(10, 2), end.at(16, 4), end.at(12, 4)};
  const bool needs64 =
      table.members == 0xFFFF || table.offset == 0xFFFFFFFF || table.bytes == 0xFFFFFFFF;
  const uint64_t end_offset = tail_offset + found;
  if (!needs64 || end_offset < kLocatorBytes) return table;

  const std::string locator_text = file.read_text(end_offset - kLocatorBytes, kLocatorBytes);
  const Fields locator(locator_text);
  if (locator.signature() != 0x07064B50) return table;  // the maximum values are meant literally
  const uint64_t end64_offset = locator.at(8, 8);
  if (!file.holds(end64_offset, kEnd64Bytes)) damaged(file, "its zip64 end is outside the file");
  const std::string end64_text = file.read_text(end64_offset, kEnd64Bytes);
  const Fields end64(end64_text);
  if (end64.signature() != 0x06064B50) damaged(file, "its zip64 end is not where it should be");
  if (end64.at(16, 4) != 0 || end64.at(20, 4) != 0) {
    file.refuse("is one part of a split zip archive.");
  }
  return {end64.at(32, 8), end64.at(48, 8), end64.at(40, 8)};
}

/// Replaces those of the three numbers that are 2^32 - 1 by the values in the zip64 extra field,
/// where they stand in this order. Returns false if a value is missing.
bool apply_zip64(std::string_view extra, uint64_t* bytes, uint64_t* stored, uint64_t* offset) {
  while (extra.size() >= 4) {
    const Fields field(extra);
    const size_t size = field.at(2, 2);
    if (size > extra.size() - 4) return false;
    if (field.at(0, 2) == 1) {
      size_t place = 4;
      for (uint64_t* number : {bytes, stored, offset}) {
        if (*number != 0xFFFFFFFF) continue;
        if (place + 8 > 4 + size) return false;
        *number = field.at(place, 8);
        place += 8;
      }
      return true;
    }
    extra.remove_prefix(4 + size);
  }
  return *bytes != 0xFFFFFFFF && *stored != 0xFFFFFFFF && *offset != 0xFFFFFFFF;
}

/// Checks the member's local header and advances `offset` from that header to the data after it.
void find_data(const File& file, const Table& table, ZipMember* member) {
  const std::string name = in_quotes(member->name);
  if (member->offset > table.offset || table.offset - member->offset < kLocalBytes) {
    damaged(file, name + " lies outside the file");
  }
  const std::string text = file.read_text(member->offset, kLocalBytes);
  const Fields local(text);
  if (local.signature() != 0x04034B50) damaged(file, name + " is not where it should be");
  const uint64_t data = member->offset + kLocalBytes + local.at(26, 2) + local.at(28, 2);
  if (data > table.offset || member->stored_bytes > table.offset - data) {
    damaged(file, name + " lies outside the file");
  }
  member->offset = data;
}

/// Overlapping members are the mark of a zip bomb.
void check_overlap(const File& file, std::vector<std::pair<uint64_t, uint64_t>> extents) {
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first < extents[i - 1].second) {
      file.refuse("has members that overlap; it was not made by NumPy.");
    }
  }
}

/// Reads the entry at the front of the table and removes it. The member's offset is that of its
/// local header.
ZipMember read_entry(const File& file, std::string_view* table) {
  const Fields entry(*table);
  if (table->size() < kCentralBytes || entry.signature() != 0x02014B50) {
    damaged(file, "its table of contents ends early");
  }
  const size_t name = entry.at(28, 2), extra = entry.at(30, 2), comment = entry.at(32, 2);
  if (table->size() - kCentralBytes < name + extra + comment) {
    damaged(file, "its table of contents ends early");
  }
  ZipMember member;
  member.name = table->substr(kCentralBytes, name);
  const std::string quoted = in_quotes(member.name);
  // Bits 0, 6 and 13 of the flags: encryption, strong encryption, masked headers.
  if ((entry.at(8, 2) & 0x2041) != 0) file.refuse("holds " + quoted + " encrypted.");
  const uint64_t method = entry.at(10, 2);
  if (method != 0 && method != 8) {
    file.refuse("holds " + quoted + " compressed by method " + std::to_string(method) +
                "; NumPy stores or deflates.");
  }
  member.deflated = method == 8;
  member.crc32 = static_cast<uint32_t>(entry.at(16, 4));
  member.stored_bytes = entry.at(20, 4);
  member.bytes = entry.at(24, 4);
  member.offset = entry.at(42, 4);
  if (!apply_zip64(table->substr(kCentralBytes + name, extra), &member.bytes, &member.stored_bytes,
                   &member.offset)) {
    damaged(file, "the zip64 sizes of " + quoted + " are missing");
  }
  if (!member.deflated && member.bytes != member.stored_bytes) {
    damaged(file, quoted + " is stored, but its two sizes differ");
  }
  table->remove_prefix(kCentralBytes + name + extra + comment);
  return member;
}

}  // namespace

std::vector<ZipMember> read_zip(const File& file) {
  const Table table = find_table(file);
  if (!file.holds(table.offset, table.bytes)) {
    damaged(file, "its table of contents lies outside the file");
  }
  if (table.members > kMostEntries) {
    file.refuse("has " + std::to_string(table.members) + " members; " +
                std::to_string(kMostEntries) + " are accepted.");
  }
  if (table.bytes > kLongestTable) file.refuse("has a table of contents of more than 100 MB.");
  const std::string text = file.read_text(table.offset, table.bytes);
  std::string_view rest = text;
  std::vector<ZipMember> members;
  std::vector<std::pair<uint64_t, uint64_t>> extents;
  for (uint64_t i = 0; i < table.members; ++i) {
    ZipMember member = read_entry(file, &rest);
    const uint64_t begin = member.offset;
    find_data(file, table, &member);
    extents.emplace_back(begin, member.offset + member.stored_bytes);
    members.push_back(std::move(member));
  }
  check_overlap(file, std::move(extents));
  return members;
}

void inflate_member(const File& file, const ZipMember& member,
                    const std::function<bool(const char* data, size_t bytes)>& piece) {
  const size_t capacity = std::clamp<uint64_t>(member.bytes, kFirstPieceBytes, kPieceBytes);
  const auto in = std::make_unique<char[]>(capacity);
  const auto out = std::make_unique<char[]>(capacity);
  z_stream stream{};
  // Negative window bits: raw deflate data without a zlib header, as zip archives hold it.
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
  const std::unique_ptr<z_stream, int (*)(z_stream*)> guard(&stream, &inflateEnd);
  const std::string name = in_quotes(member.name);
  uint64_t consumed = 0;
  uint64_t produced = 0;
  size_t room = kFirstPieceBytes;
  uLong crc = ::crc32(0, nullptr, 0);
  for (int status = Z_OK; status != Z_STREAM_END;) {
    if (stream.avail_in == 0) {
      const size_t now = std::min<uint64_t>(member.stored_bytes - consumed, room);
      file.read(member.offset + consumed, in.get(), now);
      consumed += now;
      stream.next_in = reinterpret_cast<Bytef*>(in.get());
      stream.avail_in = static_cast<uInt>(now);
    }
    stream.next_out = reinterpret_cast<Bytef*>(out.get());
    stream.avail_out = static_cast<uInt>(room);
    status = inflate(&stream, Z_NO_FLUSH);
    if (status == Z_MEM_ERROR) throw std::bad_alloc();
    if (status != Z_OK && status != Z_STREAM_END) damaged(file, name + " cannot be decompressed");
    const size_t bytes = room - stream.avail_out;
    room = capacity;
    if (bytes > member.bytes - produced) damaged(file, name + " is longer than it claims");
    produced += bytes;
    crc = ::crc32(crc, reinterpret_cast<Bytef*>(out.get()), static_cast<uInt>(bytes));
    if (bytes > 0 && !piece(out.get(), bytes)) return;
  }
  if (produced != member.bytes) damaged(file, name + " is shorter than it claims");
  if (crc != member.crc32) damaged(file, name + " has a wrong checksum");
}

}  // namespace headroom::files
