// Fuzzes the parsers of saved scalers, state dicts, checkpoints, traces, histories and arguments:
// any bytes are parsed or refused with an Error, and parsed values are valid. scripts/fuzz builds
// it once for each function below, which HEADROOM_FUZZ_TARGET names.
#include <headroom/headroom.h>
#include <headroom/tools.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "adapters/libtorch/state_dict.h"
#include "checkpoint/format.h"
#include "cli/trace.h"
#include "decide/verdict.h"
#include "record/history.h"
#include "tests/fuzz/memory_file.h"

namespace headroom {

void require(bool ok) {
  if (!ok) std::abort();
}

// A loaded state must keep the scale finite, with a normal reciprocal, in all later steps.
[[maybe_unused]] void require_valid_scales(const GradScaler& scaler, const std::string& text) {
  ScaleState state = scaler.state();
  for (int step = 0; step < 20; ++step) {
    const bool overflow = (text.size() >> step % 8 & 1) != 0;
    state.advance({overflow, 1e-3 * step});
    require(std::isfinite(state.scale()) && std::isnormal(internal::inverse(state.scale())));
  }
}

[[maybe_unused]] void scaler(const std::string& text) {
  GradScaler scaler;
  scaler.load(text);
  const std::string saved = scaler.save();
  scaler.load(saved);
  require(scaler.save() == saved);
  require_valid_scales(scaler, text);
}

// PyTorch's state dict, as JSON.
[[maybe_unused]] void state_dict(const std::string& text) {
  const libtorch::StateDict saved = libtorch::state_dict_from_json(text);
  GradScaler scaler(preset("torch"));
  using internal::ScaleStateAccess;
  const ScaleState before = scaler.state();
  scaler.load_state(ScaleStateAccess::make(
      libtorch::internal::with_state_dict(ScaleStateAccess::record(before), saved)));
  const ScaleState after = scaler.state();
  const libtorch::StateDict again =
      libtorch::internal::to_state_dict(ScaleStateAccess::record(after));
  require(libtorch::state_dict_from_json(libtorch::to_json(again)) == again);
  require_valid_scales(scaler, text);
}

struct TemporaryFolder {
  std::string path = "/tmp/headroom-fuzz-XXXXXX";
  TemporaryFolder() { require(mkdtemp(path.data()) != nullptr); }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
};

// The checksum is corrected first; otherwise no input would get past it.
[[maybe_unused]] void checkpoint(std::string text) {
  static const TemporaryFolder scratch;
  using internal::kChecksumAt;
  using internal::kChecksumDigits;
  if (text.size() >= kChecksumAt + kChecksumDigits) {
    text.replace(kChecksumAt, kChecksumDigits, kChecksumDigits, '0');
    text.replace(kChecksumAt, kChecksumDigits, internal::checksum_of({text}));
  }
  std::ofstream(scratch.path + "/checkpoint-000001.safetensors", std::ios::binary) << text;
  CheckpointFolder checkpoints(scratch.path);
  const Checkpoint loaded = checkpoints.load();
  require(loaded.step() == 1);
  for (const CheckpointTensor& item : loaded.tensors()) {
    GradDetail detail;
    if (item.tensor.count > 0) measure({item.tensor}, &detail);
  }
}

[[maybe_unused]] void trace(const std::string& text) {
  std::istringstream stream(text);
  for (const cli::TraceStep& step : cli::read_trace(stream, "trace")) {
    step.at(1024.0f);
    require(step.lost_at(1024.0f) <= step.values());
  }
}

[[maybe_unused]] void history(const std::string& text) {
  const MemoryFile file(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  internal::HistoryReader part(file.path(), 2);
  internal::HistoryReader whole(file.path());
  try {
    part.read_more();
  } catch (const Error&) {
  }
  require(part.bytes() <= static_cast<int64_t>(text.size()));
  whole.read_more();
  require(part.history().steps.size() <= whole.history().steps.size());
}

[[maybe_unused]] void arguments(const std::string& text) {
  try {
    validate(parse_policy(text));
  } catch (const Error&) {
  }
  for (const Fault& fault : parse_faults(text)) {
    require(fault.probability >= 0.0 && fault.probability <= 1.0 && fault.count >= 1);
    require(fault.applies(fault.rank < 0 ? 0 : fault.rank, fault.first_step));
  }
}

}  // namespace headroom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    headroom::HEADROOM_FUZZ_TARGET(std::string(reinterpret_cast<const char*>(data), size));
  } catch (const headroom::Error&) {
  }
  return 0;
}
