// The safetensors format: the length of a JSON header (8 bytes), the header, then the elements:
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__":
//   {}}
// As in the reference implementation, the header has at most 100 MB, and the tensors cover the data
// after it without gaps or overlaps. Unlike there, it has at most kMostEntries entries.
#include <algorithm>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "files/tensor_file.h"

namespace headroom::files {
namespace {

using Json = nlohmann::json;

struct KnownType {
  const char* name;
  uint64_t bits;
};
// All types of the reference implementation. Those that cannot be read still have their size
// checked, so that the tensors after them are found.
constexpr KnownType kKnownTypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64}};

// A tensor of the header. Kept small: a header may have 2^18 of them.
struct Entry {
  std::string name;
  const KnownType* type = nullptr;
  std::vector<int64_t> shape;
  uint64_t offsets[2] = {};
  uint8_t offset_count = 0;
  bool has_shape = false;
  bool has_offsets = false;
};

/// A SAX handler that accepts exactly the structure above. It stops the parser (by returning false)
/// at the first event that does not fit, so a hostile header never becomes a JSON tree in memory.
/// Counting the entries keeps the memory use close to the size of the header itself.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  uint64_t bytes = 0;  // of the header and its length
  std::string error;   // why the parser was stopped

  bool start_object(size_t) override {
    if (place_ == Place::kStart) return move(Place::kTop);
    if (place_ == Place::kTopValue) return move(Place::kTensor);
    if (place_ == Place::kMetadata) return move(Place::kMetadataKeys);
    return misplaced("an object");
  }
  bool end_object() override {
    if (place_ == Place::kTensor) {
      const Entry& entry = entries.back();
      if (entry.type == nullptr) return wrong_in_tensor("no dtype");
      if (!entry.has_shape) return wrong_in_tensor("no shape");
      if (entry.offset_count != 2) {
        return wrong_in_tensor("no data_offsets of two numbers");
      }
    }
    return move(place_ == Place::kTop ? Place::kEnd : Place::kTop);
  }
  bool key(std::string& key) override {
    const bool counted = place_ == Place::kTop || place_ == Place::kMetadataKeys;
    if (counted && ++count_ > kMostEntries) {
      return stop("has more than " + std::to_string(kMostEntries) + " entries");
    }
    if (place_ == Place::kTop) {
      if (key.size() > kLongestName) return stop("has a name of more than 65535 bytes");
      if (key == "__metadata__") {
        if (has_metadata_) return stop("names '__metadata__' twice");
        has_metadata_ = true;
        return move(Place::kMetadata);
      }
      entries.emplace_back().name = key;
      return move(Place::kTopValue);
    }
    if (place_ == Place::kMetadataKeys) {
      metadata_key_ = std::move(key);
      return move(Place::kMetadataValue);
    }
    Entry& entry = entries.back();
    if (key == "dtype" && entry.type == nullptr) return move(Place::kDtype);
    if (key == "shape" && !entry.has_shape) return move(Place::kShape);
    if (key == "data_offsets" && !entry.has_offsets) return move(Place::kOffsets);
    return wrong_in_tensor("an unknown or second " + in_quotes(key));
  }
  bool start_array(size_t) override {
    if (place_ == Place::kShape) {
      entries.back().has_shape = true;
      return move(Place::kShapeItems);
    }
    if (place_ == Place::kOffsets) {
      entries.back().has_offsets = true;
      return move(Place::kOffsetItems);
    }
    return misplaced("an array");
  }
  bool end_array() override { return move(Place::kTensor); }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShapeItems) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return wrong_in_tensor("a shape beyond 2^63");
      }
      if (entries.back().shape.size() == kMostDimensions) {
        return wrong_in_tensor("more than 64 dimensions");
      }
      entries.back().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsetItems && entries.back().offset_count < 2) {
      entries.back().offsets[entries.back().offset_count++] = value;
      return true;
    }
    return misplaced("a number");
  }
  bool string(string_t& value) override {
    if (place_ == Place::kMetadataValue) {
      metadata[std::move(metadata_key_)] = std::move(value);
      return move(Place::kMetadataKeys);
    }
    if (place_ != Place::kDtype) return misplaced("a string");
    const auto* const known =
        std::find_if(std::begin(kKnownTypes), std::end(kKnownTypes),
                     [&](const KnownType& type) { return value == type.name; });
    if (known == std::end(kKnownTypes)) {
      return wrong_in_tensor("the unknown dtype " + in_quotes(value));
    }
    entries.back().type = known;
    return move(Place::kTensor);
  }
  bool number_integer(number_integer_t) override { return misplaced("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return misplaced("a fraction or a number beyond 2^64");
  }
  bool null() override { return misplaced("null"); }
  bool boolean(bool) override { return misplaced("a boolean"); }
  bool binary(binary_t&) override { return misplaced("binary data"); }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    return stop("is not JSON (at byte " + std::to_string(position) + ")");
  }

 private:
  enum class Place {
    kStart,
    kTop,
    kTopValue,
    kTensor,
    kDtype,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kMetadata,
    kMetadataKeys,
    kMetadataValue,
    kEnd
  };

  bool move(Place place) {
    place_ = place;
    return true;
  }
  bool stop(const std::string& why) {
    if (error.empty()) error = why;
    return false;
  }
  bool wrong_in_tensor(const std::string& what) {
    return stop("has " + what + " for " + in_quotes(entries.back().name));
  }
  bool misplaced(const std::string& what) {
    if (entries.empty() || place_ == Place::kMetadata || place_ == Place::kMetadataValue) {
      return stop("has " + what + " where it does not belong");
    }
    return wrong_in_tensor(what + " where it does not belong");
  }

  Place place_ = Place::kStart;
  std::string metadata_key_;
  bool has_metadata_ = false;
  size_t count_ = 0;  // of tensors and metadata entries
};

/// The type in which a tensor is read; nothing if it is not supported.
std::optional<DType> dtype_of(std::string_view name, const OpenOptions& options) {
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBF16;
  if (name == "F32") return DType::kF32;
  if (name == "F64") return DType::kF64;
  if (options.bits16_are_bf16 && (name == "I16" || name == "U16")) return DType::kBF16;
  return std::nullopt;
}

/// Checks the offsets against the shape and returns the number of elements.
int64_t checked_count(const File& file, const Entry& entry) {
  // The limit keeps the number of bits below 2^63.
  const int64_t count = element_count(entry.shape, std::numeric_limits<int64_t>::max() / 64);
  if (count < 0) {
    file.refuse("claims more elements for " + in_quotes(entry.name) + " than any file holds.");
  }
  const uint64_t bits = static_cast<uint64_t>(count) * entry.type->bits;
  const uint64_t begin = entry.offsets[0];
  const uint64_t end = entry.offsets[1];
  if (end < begin || bits % 8 != 0 || end - begin != bits / 8) {
    file.refuse("gives " + in_quotes(entry.name) + " bytes " + std::to_string(begin) + " to " +
                std::to_string(end) + ", but its shape and dtype take " +
                std::to_string((bits + 7) / 8) + ".");
  }
  return count;
}

// Sorts pointers instead of building a set of strings, to save memory.
void check_names(const File& file, const std::vector<Entry>& entries) {
  std::vector<const std::string*> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(&entry.name);
  std::sort(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a < *b; });
  const auto twice = std::adjacent_find(names.begin(), names.end(),
                                        [](const auto* a, const auto* b) { return *a == *b; });
  if (twice == names.end()) return;
  file.refuse("is not a valid safetensors file: its header names " + in_quotes(**twice) +
              " twice.");
}

HeaderReader read_header(const File& file) {
  uint64_t length = 0;
  if (file.size() < sizeof(length)) file.refuse("is too short for a safetensors file.");
  file.read(0, &length, sizeof(length));
  if (length > file.size() - sizeof(length)) {
    file.refuse("is neither .npy nor .npz, and as safetensors it claims a header of " +
                std::to_string(length) + " bytes, more than the file has.");
  }
  if (length > kLongestHeader) {
    file.refuse("claims a header of " + std::to_string(length) + " bytes; safetensors allows " +
                std::to_string(kLongestHeader) + ".");
  }
  const std::string text = file.read_text(sizeof(length), length);
  HeaderReader reader;
  const bool done = Json::sax_parse(text, &reader);
  if (!done || !reader.error.empty()) {
    file.refuse("is not a valid safetensors file: its header " + reader.error + ".");
  }
  check_names(file, reader.entries);
  reader.bytes = sizeof(length) + length;
  return reader;
}

}  // namespace

Contents read_safetensors(const File& file, const OpenOptions& options) {
  static_assert(std::endian::native == std::endian::little);
  HeaderReader header = read_header(file);
  std::vector<Entry>& entries = header.entries;
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.offsets[0], a.offsets[1]) < std::pair(b.offsets[0], b.offsets[1]);
  });
  const uint64_t data_bytes = file.size() - header.bytes;
  uint64_t covered = 0;  // bytes of data that belong to the tensors so far
  Contents contents;
  contents.metadata = std::move(header.metadata);
  for (Entry& entry : entries) {
    const int64_t count = checked_count(file, entry);
    if (entry.offsets[0] != covered) {
      file.refuse("has " + std::string(entry.offsets[0] < covered ? "an overlap" : "a gap") +
                  " before " + in_quotes(entry.name) + ": it begins at byte " +
                  std::to_string(entry.offsets[0]) + " of the data, not " +
                  std::to_string(covered) + ".");
    }
    covered = entry.offsets[1];
    if (covered > data_bytes) {
      file.refuse("is truncated: " + in_quotes(entry.name) + " ends at byte " +
                  std::to_string(covered) + " of the data, which has " +
                  std::to_string(data_bytes) + ".");
    }
    const std::optional<DType> dtype = dtype_of(entry.type->name, options);
    if (!dtype.has_value()) {
      contents.left_out.push_back({std::move(entry.name), entry.type->name, count});
      continue;
    }
    Tensor& tensor = contents.tensors.emplace_back();
    tensor.name = std::move(entry.name);
    tensor.dtype = *dtype;
    tensor.count = count;
    tensor.shape = std::move(entry.shape);
    tensor.offset = header.bytes + entry.offsets[0];
    tensor.stored_bytes = entry.offsets[1] - entry.offsets[0];
  }
  if (covered != data_bytes) {
    file.refuse("has " + std::to_string(data_bytes - covered) + " bytes after its last tensor.");
  }
  return contents;
}

}  // namespace headroom::files
