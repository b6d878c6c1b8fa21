#include "cli/train/random_state.h"

#include <headroom/error.h>

#include <mutex>
#include <sstream>

namespace headroom::cli {
namespace {

constexpr const char* kHexDigits = "0123456789abcdef";

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kBadState,
              "The checkpoint has no valid state of a random generator; it is damaged or comes "
              "from another LibTorch.");
}

}  // namespace

std::string random_state(const torch::Generator& generator) {
  const torch::Tensor bytes = generator.get_state().cpu().contiguous();
  const auto* const data = bytes.data_ptr<uint8_t>();
  std::string text;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    text += kHexDigits[data[i] >> 4];
    text += kHexDigits[data[i] & 15];
  }
  return text;
}

std::string random_state(const std::mt19937_64& generator) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << generator;
  return text.str();
}

void set_random_state(torch::Generator& generator, const std::string& text) {
  if (text.size() % 2 != 0 || text.find_first_not_of(kHexDigits) != std::string::npos) refuse();
  const torch::Tensor bytes = torch::empty({static_cast<int64_t>(text.size() / 2)}, torch::kByte);
  auto* const data = bytes.data_ptr<uint8_t>();
  for (size_t i = 0; i < text.size() / 2; ++i) {
    data[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  try {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(bytes);
  } catch (const c10::Error&) {
    refuse();
  }
}

void set_random_state(std::mt19937_64& generator, const std::string& text) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  std::mt19937_64 read;
  if (!(stream >> read)) refuse();
  generator = read;
}

}  // namespace headroom::cli
