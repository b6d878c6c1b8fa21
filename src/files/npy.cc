// The .npy format: the magic "\x93NUMPY", a version, the length of a header, the header, then the
// elements. The header is the literal of a Python dictionary:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
#include "files/npy.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>

namespace headroom::files {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr const char* kStructured = "structured";

/// Parses exactly the dictionary above; rejects all other Python syntax.
class LiteralReader {
 public:
  explicit LiteralReader(std::string_view text) : text_(text) {}

  bool read(NpyHeader* header) {
    bool has_descr = false, has_order = false, has_shape = false;
    if (!take('{')) return false;
    while (!take('}')) {
      std::string key;
      if (!text(&key) || !take(':')) return false;
      bool good = false;
      if (key == "descr" && !has_descr) {
        good = has_descr = text(&header->descr);
        structured_ = !good && peek('[');
      } else if (key == "fortran_order" && !has_order) {
        good = has_order = word("True") || word("False");  // element order is irrelevant
      } else if (key == "shape" && !has_shape) {
        good = has_shape = shape(&header->tensor.shape);
      }
      if (!good) return false;
      if (!take(',') && !peek('}')) return false;
    }
    skip_space();
    return text_.empty() && has_descr && has_order && has_shape;
  }
  bool structured() const { return structured_; }

 private:
  void skip_space() {
    text_.remove_prefix(std::min(text_.find_first_not_of(" \t\r\n"), text_.size()));
  }
  bool peek(char c) {
    skip_space();
    return !text_.empty() && text_.front() == c;
  }
  bool take(char c) {
    if (!peek(c)) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool word(std::string_view word) {
    skip_space();
    if (text_.substr(0, word.size()) != word) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  bool text(std::string* out) {
    const char quote = peek('"') ? '"' : '\'';
    if (!take(quote)) return false;
    const size_t end = text_.find(quote);
    if (end == std::string_view::npos) return false;
    *out = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    return out->find('\\') == std::string::npos;
  }
  bool shape(std::vector<int64_t>* out) {
    if (!take('(')) return false;
    while (!take(')')) {
      skip_space();
      int64_t extent = 0;
      const char* end = text_.data() + text_.size();
      const auto [stop, error] = std::from_chars(text_.data(), end, extent);
      if (error != std::errc() || out->size() == kMostDimensions) return false;
      text_.remove_prefix(static_cast<size_t>(stop - text_.data()));
      take('L');  // NumPy under Python 2 wrote (2L, 3L)
      out->push_back(extent);
      if (!take(',') && !peek(')')) return false;
    }
    return true;
  }

  std::string_view text_;
  bool structured_ = false;
};

/// Derives dtype, byte order and `supported` from the descr. Returns false if it is not a type that
/// NumPy writes.
bool parse_type(const OpenOptions& options, NpyHeader* header) {
  const std::string& descr = header->descr;
  header->supported = true;
  if (descr == "bfloat16") {  // not NumPy's, but some exporters write it
    header->tensor.dtype = DType::kBF16;
    return true;
  }
  if (descr.size() < 2) return false;
  const bool has_order = std::string_view("<>|=").find(descr[0]) != std::string_view::npos;
  const std::string type = has_order ? descr.substr(1) : descr;
  if (type.empty() || std::string_view("?bBiufcmMOSUVaV").find(type[0]) == std::string_view::npos) {
    return false;
  }
  header->tensor.big_endian = descr[0] == '>';
  if (type == "f2") {
    header->tensor.dtype = DType::kF16;
  } else if (type == "f4") {
    header->tensor.dtype = DType::kF32;
  } else if (type == "f8") {
    header->tensor.dtype = DType::kF64;
  } else if (options.bits16_are_bf16 && (type == "V2" || type == "i2" || type == "u2")) {
    header->tensor.dtype = DType::kBF16;
  } else {
    header->supported = false;
  }
  return true;
}

/// Compares the size of the elements with `bytes`, the size of header and elements. Returns an
/// error as NpyHeader::error, or nothing.
std::string check_size(const NpyHeader& header, uint64_t bytes) {
  const int64_t count = header.tensor.count;
  const uint64_t data = bytes - header.bytes;
  const auto needed = static_cast<uint64_t>(count) * size_of(header.tensor.dtype);
  if (needed > data) {
    return "is truncated: it should hold " + std::to_string(count) + " elements of " +
           header.descr + ", " + std::to_string(needed) + " bytes, and has " + std::to_string(data);
  }
  if (needed < data) {
    return "has " + std::to_string(data - needed) +
           " bytes after its array; save several arrays as .npz";
  }
  return "";
}

}  // namespace

size_t npy_header_bytes(std::string_view start) {
  if (start.size() < 12) return 12;
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(start[i])); };
  const size_t short_length = byte(8) | byte(9) << 8;
  return byte(6) == 1 ? 10 + short_length : 12 + (short_length | byte(10) << 16 | byte(11) << 24);
}

bool may_be_bf16(const std::string& descr) {
  return descr.ends_with("V2") || descr.ends_with("i2") || descr.ends_with("u2") ||
         descr == "I16" || descr == "U16";  // the last two are names of safetensors
}

std::string unsupported_type(const std::string& descr) {
  if (descr == kStructured) return "holds a structured array; save its fields one by one";
  return "is of type " + in_quotes(descr) + ", not of f16, bf16, f32 or f64" +
         (may_be_bf16(descr) ? "; if its 16 bits are bf16, add --as bf16" : "");
}

NpyHeader parse_npy(std::string_view start, uint64_t bytes, const OpenOptions& options) {
  NpyHeader header;
  const auto refuse = [&](const std::string& why) {
    header.error = why;
    return header;
  };
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(start[i])); };
  if (start.substr(0, kMagic.size()) != kMagic) return refuse("is not an .npy file");
  if (start.size() < 12) return refuse("is truncated in its header");
  const size_t version = byte(6);
  if (version < 1 || version > 3 || byte(7) != 0) {
    return refuse("has version " + std::to_string(version) + "." + std::to_string(byte(7)) +
                  " of .npy, which is not supported");
  }
  const size_t prefix = version == 1 ? 10 : 12;
  const size_t length = npy_header_bytes(start) - prefix;
  if (length > kLongestNpyHeader - 12) {
    return refuse("claims a header of " + std::to_string(length) + " bytes, more than the limit");
  }
  if (length > start.size() - prefix) return refuse("is truncated in its header");
  header.bytes = prefix + length;

  LiteralReader reader(start.substr(prefix, length));
  const bool valid = reader.read(&header);
  if (reader.structured()) {
    header.descr = kStructured;
    return header;
  }
  if (!valid) return refuse("has a header that is not NumPy's");
  if (!parse_type(options, &header)) {
    return refuse("has the unknown dtype " + in_quotes(header.descr));
  }
  // The limit keeps count times the size of an element below 2^63.
  Tensor& tensor = header.tensor;
  tensor.count = element_count(tensor.shape, std::numeric_limits<int64_t>::max() / 16);
  if (tensor.count < 0) return refuse("has a shape that is negative or larger than any file");
  if (header.supported) header.error = check_size(header, bytes);
  return header;
}

Contents read_npy(const File& file, const OpenOptions& options) {
  const std::string start = file.read_text(0, std::min<uint64_t>(file.size(), kLongestNpyHeader));
  NpyHeader header = parse_npy(start, file.size(), options);
  if (!header.error.empty()) file.refuse(header.error + ".");
  if (!header.supported) file.refuse(unsupported_type(header.descr) + ".");
  Tensor& tensor = header.tensor;
  tensor.name = std::filesystem::path(file.path()).filename().string();
  if (tensor.name.ends_with(".npy")) tensor.name.resize(tensor.name.size() - 4);
  tensor.offset = header.bytes;
  tensor.stored_bytes = file.size() - header.bytes;
  return {{std::move(tensor)}, {}};
}

}  // namespace headroom::files
