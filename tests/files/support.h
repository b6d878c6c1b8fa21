// Builds safetensors, .npy and .npz files, valid and damaged, for tests of their readers.
#ifndef HEADROOM_TESTS_FILES_SUPPORT_H_
#define HEADROOM_TESTS_FILES_SUPPORT_H_

#include <unistd.h>
#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "files/tensor_file.h"
#include "tests/support.h"

namespace headroom::files {

/// A temporary file with the given content, removed by the destructor.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content) {
    static int number = 0;
    path_ = (std::filesystem::temp_directory_path() /
             ("headroom_" + std::to_string(getpid()) + "_" + std::to_string(number++)))
                .string();
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string little_endian(uint64_t value, size_t bytes) {
  return {reinterpret_cast<const char*>(&value), bytes};
}

template <typename T>
std::string to_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

inline std::string npy(const std::string& descr, const std::string& shape, const std::string& data,
                       const std::string& order = "False") {
  std::string header =
      "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }";
  header += std::string(63 - (10 + header.size()) % 64, ' ') + "\n";
  return std::string("\x93NUMPY\x01\x00", 8) + little_endian(header.size(), 2) + header + data;
}

inline std::string deflate_bytes(const std::string& data) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, data.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// A member of an archive. Its headers can be made to contradict its data.
struct Member {
  std::string name;
  std::string data;  // uncompressed
  bool deflate = false;
  bool zip64 = false;
  uint64_t flags = 0;
  uint64_t method = 0;       // 0: the method that `deflate` selects
  int64_t claimed_more = 0;  // added to the uncompressed size in the headers
  bool wrong_crc = false;
};

inline std::string zip(const std::vector<Member>& members) {
  std::string file, table;
  for (const Member& member : members) {
    const std::string stored = member.deflate ? deflate_bytes(member.data) : member.data;
    const uint64_t method = member.method != 0 ? member.method : member.deflate ? 8 : 0;
    uint64_t crc = crc32(0, reinterpret_cast<const Bytef*>(member.data.data()),
                         static_cast<uInt>(member.data.size()));
    if (member.wrong_crc) crc ^= 1;
    const uint64_t bytes = member.data.size() + static_cast<uint64_t>(member.claimed_more);
    const uint64_t offset = file.size();
    const bool wide = member.zip64;
    const std::string sizes =
        wide ? std::string(8, '\xff') : little_endian(stored.size(), 4) + little_endian(bytes, 4);
    const std::string common = little_endian(member.flags, 2) + little_endian(method, 2) +
                               little_endian(0, 4) + little_endian(crc, 4) + sizes +
                               little_endian(member.name.size(), 2);
    const std::string extra = wide ? little_endian(1, 2) + little_endian(24, 2) +
                                         little_endian(bytes, 8) + little_endian(stored.size(), 8) +
                                         little_endian(offset, 8)
                                   : "";
    file += "PK\x03\x04" + little_endian(45, 2) + common + little_endian(extra.size(), 2) +
            member.name + extra + stored;
    table += "PK\x01\x02" + little_endian(45, 2) + little_endian(45, 2) + common +
             little_endian(extra.size(), 2) + little_endian(0, 2) + little_endian(0, 2) +
             little_endian(0, 2) + little_endian(0, 4) +
             (wide ? std::string(4, '\xff') : little_endian(offset, 4)) + member.name + extra;
  }
  const uint64_t table_offset = file.size();
  return file + table + "PK\x05\x06" + little_endian(0, 4) + little_endian(members.size(), 2) +
         little_endian(members.size(), 2) + little_endian(table.size(), 4) +
         little_endian(table_offset, 4) + little_endian(0, 2);
}

/// The bytes of all elements of a tensor.
inline std::string read_all_elements(const TensorFile& file, const Tensor& tensor) {
  std::string bytes;
  file.read(tensor, 0, tensor.count, [&](const void* data, int64_t count) {
    bytes.append(static_cast<const char*>(data),
                 static_cast<size_t>(count) * size_of(tensor.dtype));
  });
  return bytes;
}

/// Opens the content as a file and reads all of it. Expects an Error that names the file, contains
/// `part` and ends with a full stop.
inline void expect_refused(const std::string& content, const std::string& part,
                           const OpenOptions& options = {}) {
  const TemporaryFile file(content);
  try {
    const TensorFile opened(file.path(), options);
    for (const Tensor& tensor : opened.tensors()) read_all_elements(opened, tensor);
    ADD_FAILURE() << "the file was accepted; expected '" << part << "'";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(part), std::string::npos) << what;
    EXPECT_NE(what.find(file.path()), std::string::npos) << what;
    EXPECT_EQ(what.back(), '.') << what;
  }
}

}  // namespace headroom::files

#endif  // HEADROOM_TESTS_FILES_SUPPORT_H_
