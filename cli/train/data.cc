#include "cli/train/data.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "cli/output.h"

namespace headroom::cli {
namespace {

std::string read_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    refuse(fmt::format("'{}' is a folder; a file is needed.", path));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(fmt::format("'{}' cannot be opened: {}.", path, std::strerror(errno)));
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) refuse(fmt::format("'{}' could not be read completely.", path));
  return std::move(text).str();
}

// The IDX format: two zero bytes, the element type (8: unsigned bytes), the number of dimensions,
// the sizes as big-endian 32-bit integers, then the elements.
torch::Tensor read_idx(const std::string& path, int dimensions) {
  const std::string bytes = read_file(path);
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const size_t header = 4 + 4 * static_cast<size_t>(dimensions);
  if (bytes.size() >= 2 && byte(0) == 0x1f && byte(1) == 0x8b) {
    refuse(fmt::format("'{}' is compressed; unpack it with gunzip first.", path));
  }
  if (bytes.size() < header || byte(0) != 0 || byte(1) != 0 || byte(2) != 8 ||
      byte(3) != dimensions) {
    refuse(fmt::format("'{}' is not an IDX file of bytes with {} dimensions.", path, dimensions));
  }
  std::vector<int64_t> sizes;
  uint64_t count = 1;
  for (int d = 0; d < dimensions; ++d) {
    uint32_t size = 0;
    for (size_t i = 0; i < 4; ++i) size = size << 8 | byte(4 + 4 * static_cast<size_t>(d) + i);
    if (size == 0 || count > (uint64_t{1} << 40) / size) {
      refuse(fmt::format("'{}' claims an impossible size of {} in dimension {}.", path, size, d));
    }
    count *= size;
    sizes.push_back(size);
  }
  if (bytes.size() - header != count) {
    refuse(fmt::format("'{}' should have {} bytes of data and has {}; it is damaged.", path, count,
                       bytes.size() - header));
  }
  return torch::from_blob(const_cast<char*>(bytes.data()) + header, sizes, torch::kByte).clone();
}

ImageSet read_idx_pair(const std::string& folder, const std::string& prefix) {
  const auto find = [&](const std::string& what, int dimensions) {
    for (const char dot : {'-', '.'}) {
      const std::string path =
          fmt::format("{}/{}-{}{}idx{}-ubyte", folder, prefix, what, dot, dimensions);
      if (std::filesystem::exists(path)) return read_idx(path, dimensions);
    }
    refuse(
        fmt::format("'{}' has no {}-{}-idx{}-ubyte; the four files of an IDX image set are needed "
                    "(train and t10k, images and labels), unpacked.",
                    folder, prefix, what, dimensions));
  };
  const torch::Tensor images = find("images", 3);
  const torch::Tensor labels = find("labels", 1);
  if (images.size(0) != labels.size(0)) {
    refuse(fmt::format("'{}' has {} {} images and {} labels; they belong to different sets.",
                       folder, images.size(0), prefix, labels.size(0)));
  }
  if (labels.max().item<int>() > 9) {
    refuse(fmt::format("'{}' has labels above 9; sets of ten classes are needed.", folder));
  }
  if (images.size(1) < 8 || images.size(2) < 8) {
    refuse(fmt::format("'{}' has images of {} x {}; at least 8 x 8 is needed.", folder,
                       images.size(1), images.size(2)));
  }
  return {images.unsqueeze(1).to(torch::kFloat) / 255.0, labels.to(torch::kLong)};
}

// A 5x7 bitmap font: the rows of the ten digits.
constexpr std::array<std::array<uint8_t, 7>, 10> kDigits = {{
    {14, 17, 19, 21, 25, 17, 14},
    {4, 12, 4, 4, 4, 4, 14},
    {14, 17, 1, 2, 4, 8, 31},
    {31, 2, 4, 2, 1, 17, 14},
    {2, 6, 10, 18, 31, 2, 2},
    {31, 16, 30, 1, 1, 17, 14},
    {6, 8, 16, 30, 17, 17, 14},
    {31, 1, 2, 4, 8, 8, 8},
    {14, 17, 17, 14, 17, 17, 14},
    {14, 17, 17, 15, 1, 2, 12},
}};
constexpr int kSide = 28;

// The bitmap of a digit at (x, y), interpolated bilinearly.
float ink(int digit, float x, float y) {
  const auto dot = [&](int column, int row) {
    const bool inside = column >= 0 && column < 5 && row >= 0 && row < 7;
    const uint8_t bits = inside ? kDigits[static_cast<size_t>(digit)][static_cast<size_t>(row)] : 0;
    return static_cast<float>(bits >> (4 - (inside ? column : 0)) & 1);
  };
  const int column = static_cast<int>(std::floor(x));
  const int row = static_cast<int>(std::floor(y));
  const float fx = x - static_cast<float>(column);
  const float fy = y - static_cast<float>(row);
  return (1 - fy) * ((1 - fx) * dot(column, row) + fx * dot(column + 1, row)) +
         fy * ((1 - fx) * dot(column, row + 1) + fx * dot(column + 1, row + 1));
}

ImageSet draw_digits(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> unit(-1.0f, 1.0f);
  ImageSet set{torch::empty({count, 1, kSide, kSide}), torch::empty({count}, torch::kLong)};
  float* pixel = set.images.data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const int digit = static_cast<int>(random() % 10);
    set.labels[i] = digit;
    const float angle = 0.5f * unit(random);
    const float size = 2.6f + 0.7f * unit(random);  // pixels per dot of the font
    const float dx = 3.0f * unit(random);
    const float dy = 3.0f * unit(random);
    for (int row = 0; row < kSide; ++row) {
      for (int column = 0; column < kSide; ++column) {
        const float x = (static_cast<float>(column) - 13.5f - dx) / size;
        const float y = (static_cast<float>(row) - 13.5f - dy) / size;
        const float u = x * std::cos(angle) + y * std::sin(angle) + 2.0f;
        const float v = y * std::cos(angle) - x * std::sin(angle) + 3.0f;
        *pixel++ = std::clamp(ink(digit, u, v) + 0.25f * unit(random), 0.0f, 1.0f);
      }
    }
  }
  return set;
}

}  // namespace

std::string read_text(const std::string& path) {
  std::string text = read_file(path);
  if (text.empty()) refuse(fmt::format("'{}' is empty.", path));
  return text;
}

std::string synthetic_text(size_t bytes) {
  using Words = std::vector<const char*>;
  const Words who = {"the fox",         "an old sailor",   "the miller",  "my sister",
                     "a tall stranger", "the baker's cat", "every child", "nobody",
                     "the night train", "a red kite"};
  const Words does = {"watches", "follows", "remembers", "carries", "paints",
                      "forgets", "counts",  "sells",     "repairs", "hides"};
  const Words what = {"the harbour lights",      "a silver coin",     "three wooden boats",
                      "the first snow",          "an empty bottle",   "the long road home",
                      "a letter from the north", "seven grey stones", "the clock tower",
                      "a broken violin"};
  const Words when = {"at dawn",      "in the rain",    "before the feast", "without a word",
                      "every winter", "near the river", "for a whole year", "when the wind turns"};
  const Words link = {"and", "but", "while", "because", "so"};
  std::mt19937_64 random(20);
  const auto pick = [&](const Words& words) { return words[random() % words.size()]; };
  std::string text;
  while (text.size() < bytes) {
    text += fmt::format("{} {} {}", pick(who), pick(does), pick(what));
    if (random() % 2 == 0) text += fmt::format(" {}", pick(when));
    if (random() % 3 == 0)
      text += fmt::format(", {} {} {} {}", pick(link), pick(who), pick(does), pick(what));
    text += ".\n";
  }
  text.resize(bytes);
  return text;
}

ImageData read_idx_folder(const std::string& folder) {
  if (!std::filesystem::is_directory(folder)) {
    refuse(fmt::format("'{}' is not a folder; pass the folder with the IDX files.", folder));
  }
  ImageData data{read_idx_pair(folder, "train"), read_idx_pair(folder, "t10k")};
  if (data.train.images.sizes().slice(1) != data.test.images.sizes().slice(1)) {
    refuse(fmt::format("'{}' has train and t10k images of different sizes.", folder));
  }
  return data;
}

ImageData synthetic_digits() { return {draw_digits(8192, 1), draw_digits(2048, 2)}; }

}  // namespace headroom::cli
