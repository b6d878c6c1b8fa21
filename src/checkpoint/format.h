// checkpoint/: saves the state of a run to disk and loads the newest valid one. It must not know
// what the tensors and the state mean: they are named arrays and a text.
//
// A checkpoint is a safetensors file, so that other tools can read it. Its header begins with a
// checksum over the whole file, computed with the digits of the checksum itself set to '0':
//   {"__metadata__":{"checksum":"<32 hex digits>","format":"headroom-checkpoint","version":"1",
//    "step":"123","state":"..."},"name":{...},...}
#ifndef HEADROOM_SRC_CHECKPOINT_FORMAT_H_
#define HEADROOM_SRC_CHECKPOINT_FORMAT_H_

#include <headroom/checkpoint.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom::internal {

inline constexpr std::string_view kCheckpointStart = R"({"__metadata__":{"checksum":")";
inline constexpr size_t kChecksumAt = sizeof(uint64_t) + kCheckpointStart.size();
inline constexpr size_t kChecksumDigits = 32;

/// The XXH3-128 hash of the concatenated pieces, as 32 hexadecimal digits.
std::string checksum_of(const std::vector<std::string_view>& pieces);

/// The memory of a tensor on the CPU.
std::string_view bytes_of(const TensorView& tensor);

/// The part of the file before the elements: the header's length and the header, including the
/// checksum, for which all elements are read. Throws Error(kInvalidArgument) for invalid names,
/// shapes or text.
std::string checkpoint_header(int64_t step, const std::vector<CheckpointTensor>& tensors,
                              const std::string& state);

/// Parses a step: decimal digits only. Returns a negative number for any other text.
int64_t step_of(std::string_view text);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CHECKPOINT_FORMAT_H_
