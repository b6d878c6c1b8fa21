// checkpoint/ keeps the state of a run on disk. A checkpoint is a safetensors file whose header
// begins with a checksum over the whole file, its own digits taken to be '0':
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

/// XXH3's 128 bits over all pieces, in hex.
std::string checksum_of(const std::vector<std::string_view>& pieces);

/// The bytes of a tensor on the CPU.
std::string_view bytes_of(const TensorView& tensor);

/// All that comes before the tensors' bytes: the header's length and the header, with the checksum.
/// Throws Error(kInvalidArgument) if a tensor or a text cannot be written.
std::string checkpoint_header(int64_t step, const std::vector<CheckpointTensor>& tensors,
                              const std::string& state);

/// The step that a text says: a number and nothing else; below 0 if it does not.
int64_t step_of(std::string_view text);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_CHECKPOINT_FORMAT_H_
