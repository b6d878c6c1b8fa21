#include "checkpoint/format.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "files/tensor_file.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace headroom {
namespace internal {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "headroom-checkpoint";
constexpr const char* kVersion = "1";
constexpr size_t kAlignment = 64;  // of the first tensor, in the file and in memory

// Names of the types in a safetensors header, indexed by DType.
const char* safetensors_name(DType dtype) {
  constexpr const char* kNames[] = {"F16", "BF16", "F32", "F64"};
  return kNames[static_cast<size_t>(dtype)];
}

// Throws if the tensor cannot be saved. `names` are those of the tensors before it.
void check_tensor(const CheckpointTensor& item, std::set<std::string>* names) {
  const auto called = [&] { return "The tensor '" + item.name + "' of the checkpoint"; };
  require(item.tensor.device.type == DeviceType::kCPU, ErrorCode::kUnsupported,
          [&] { return called() + " is not on the CPU; copy it there first."; });
  if (item.tensor.count != 0) check_view(item.tensor, Access::kRead, called);
  require(item.tensor.dtype <= DType::kF64, ErrorCode::kInvalidArgument,
          [&] { return called() + " has an unknown type."; });
  require(
      !item.name.empty() && item.name != "__metadata__" &&
          item.name.size() <= files::kLongestName && names->insert(item.name).second,
      ErrorCode::kInvalidArgument, [&] {
        return called() +
               " has a name that is empty, too long, reserved or not unique; give each tensor a "
               "name of its own.";
      });
  require(item.shape.empty() ||
              files::element_count(item.shape, item.tensor.count) == item.tensor.count,
          ErrorCode::kMismatch,
          [&] { return called() + " has a shape that does not match its number of elements."; });
}

}  // namespace

std::string checksum_of(const std::vector<std::string_view>& pieces) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const std::string_view piece : pieces) {
    XXH3_128bits_update(&state, piece.data(), piece.size());
  }
  XXH128_canonical_t bytes;  // big-endian, so that the digits are the same on every machine
  XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(&state));
  std::string hex;
  for (const unsigned char byte : bytes.digest) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::string_view bytes_of(const TensorView& tensor) {
  return {static_cast<const char*>(tensor.data), tensor.bytes()};
}

std::string checkpoint_header(int64_t step, const std::vector<CheckpointTensor>& tensors,
                              const std::string& state) {
  static_assert(std::endian::native == std::endian::little);
  require(step >= 0, ErrorCode::kInvalidArgument, [&] {
    return "The step of a checkpoint is " + std::to_string(step) + "; it must be 0 or more.";
  });
  ordered_json header;
  header["__metadata__"] = {{"checksum", std::string(kChecksumDigits, '0')},
                            {"format", kFormat},
                            {"version", kVersion},
                            {"step", std::to_string(step)},
                            {"state", state}};
  constexpr size_t kMetadata = 6;  // "__metadata__" and its five entries
  require(tensors.size() <= files::kMostEntries - kMetadata, ErrorCode::kInvalidArgument, [&] {
    return "The checkpoint has " + std::to_string(tensors.size()) + " tensors, more than the " +
           std::to_string(files::kMostEntries - kMetadata) + " that can be read back; merge some.";
  });
  std::set<std::string> names;
  size_t end = 0;
  for (const CheckpointTensor& item : tensors) {
    check_tensor(item, &names);
    const size_t begin = end;
    end += item.tensor.bytes();
    header[item.name] = {
        {"dtype", safetensors_name(item.tensor.dtype)},
        {"shape", item.shape.empty() ? std::vector<int64_t>{item.tensor.count} : item.shape},
        {"data_offsets", {begin, end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const ordered_json::exception&) {
    throw Error(ErrorCode::kInvalidArgument,
                "The state or the name of a tensor is not UTF-8, which checkpoints require; encode "
                "it.");
  }
  // Pad the header with spaces, as safetensors recommends, so that the elements are aligned.
  const size_t used = (sizeof(uint64_t) + text.size()) % kAlignment;
  if (used != 0) text.append(kAlignment - used, ' ');
  require(text.size() <= files::kLongestHeader, ErrorCode::kInvalidArgument, [] {
    return "The state and the names of the checkpoint have more than 100 MB, the limit of "
           "safetensors; put large data into tensors.";
  });
  const uint64_t length = text.size();
  std::string start(sizeof(length), '\0');
  std::memcpy(start.data(), &length, sizeof(length));
  start += text;
  // The checksum covers the header with zeros in place of the checksum, then all elements.
  std::vector<std::string_view> pieces = {start};
  for (const CheckpointTensor& item : tensors) pieces.push_back(bytes_of(item.tensor));
  const std::string checksum = checksum_of(pieces);
  return start.replace(kChecksumAt, kChecksumDigits, checksum);
}

}  // namespace internal

namespace {

// The whole file in aligned memory. aligned_alloc() requires a multiple of the alignment.
std::shared_ptr<char> read_whole(const files::File& file) {
  constexpr size_t kAlignment = internal::kAlignment;
  const size_t bytes = (file.size() / kAlignment + 1) * kAlignment;
  std::shared_ptr<char> memory(static_cast<char*>(std::aligned_alloc(kAlignment, bytes)),
                               &std::free);
  if (memory == nullptr) file.refuse("does not fit in memory.");
  file.read(0, memory.get(), file.size());
  return memory;
}

}  // namespace

int64_t internal::step_of(std::string_view text) {
  int64_t step = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  return error == std::errc() && end == text.data() + text.size() ? step : -1;
}

const CheckpointTensor* Checkpoint::find(const std::string& name) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                  [&](const CheckpointTensor& item) { return item.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

Checkpoint Checkpoint::read(const std::string& path) {
  using internal::kCheckpointStart;
  using internal::kChecksumAt;
  using internal::kChecksumDigits;
  const files::File file(path, files::Links::kRefused);
  if (file.size() < kChecksumAt + kChecksumDigits) file.refuse("is truncated.");
  const std::string start = file.read_text(sizeof(uint64_t), kCheckpointStart.size());
  if (start != kCheckpointStart) file.refuse("is not a checkpoint.");
  // Verify the checksum before any part of the file is interpreted.
  const std::shared_ptr<char> memory = read_whole(file);
  char* const digits = memory.get() + kChecksumAt;
  const std::string expected(digits, kChecksumDigits);
  std::memset(digits, '0', kChecksumDigits);
  if (internal::checksum_of({{memory.get(), file.size()}}) != expected) {
    file.refuse("is damaged or truncated: its checksum does not match its contents.");
  }

  files::Contents contents = files::read_safetensors(file, {});
  if (!contents.left_out.empty()) file.refuse("has a tensor of an unsupported type.");
  auto& metadata = contents.metadata;
  if (metadata["format"] != internal::kFormat || metadata["version"] != internal::kVersion) {
    file.refuse("has a format or version that this library does not read.");
  }
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  checkpoint.step_ = internal::step_of(metadata["step"]);
  if (checkpoint.step_ < 0) file.refuse("has no step.");
  checkpoint.state_ = std::move(metadata["state"]);
  // The tensors are views of the file's memory, which the checkpoint and its copies share.
  for (files::Tensor& tensor : contents.tensors) {
    const char* const data = memory.get() + tensor.offset;
    checkpoint.tensors_.push_back({std::move(tensor.name),
                                   view(static_cast<const void*>(data), tensor.dtype, tensor.count),
                                   std::move(tensor.shape)});
  }
  checkpoint.memory_ = memory;
  return checkpoint;
}

}  // namespace headroom
