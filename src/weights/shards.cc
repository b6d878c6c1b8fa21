#include "weights/shards.h"

#include <headroom/error.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <string_view>

#include "files/tensor_file.h"

namespace headroom::internal {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kIndexEnding = ".safetensors.index.json";

/// Reads {"weight_map": {"tensor": "file", ...}, ...} without building a JSON tree, so that a
/// hostile index takes no more memory than its text. Other members are ignored.
class IndexReader : public nlohmann::json_sax<Json> {
 public:
  std::map<std::string, std::vector<std::string>> tensors;  // by file
  bool has_map = false;
  std::string error;

  bool start_object(size_t) override { return enter(true); }
  bool start_array(size_t) override { return enter(false); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(std::string& key) override {
    key_ = std::move(key);
    if (depth_ == 1 && key_ == "weight_map") {
      if (has_map) return stop("has two weight_maps");
      has_map = true;
      map_next_ = true;
    }
    return true;
  }
  bool string(string_t& value) override {
    if (map_next_) return no_object();
    if (!in_map()) return true;
    if (++count_ > files::kMostEntries) {
      return stop("has more than " + std::to_string(files::kMostEntries) + " tensors");
    }
    // Shards lie beside their index. Nothing else may be opened by a file that was downloaded.
    const bool plain = !value.empty() && value != "." && value != ".." && value.size() <= 255 &&
                       value.find('/') == std::string::npos &&
                       value.find('\0') == std::string::npos;
    if (!plain) return stop("names " + files::in_quotes(value) + ", which is no file name");
    tensors[value].push_back(std::move(key_));
    return true;
  }
  bool number_unsigned(number_unsigned_t) override { return other(); }
  bool number_integer(number_integer_t) override { return other(); }
  bool number_float(number_float_t, const string_t&) override { return other(); }
  bool null() override { return other(); }
  bool boolean(bool) override { return other(); }
  bool binary(binary_t&) override { return other(); }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    return stop("is not JSON (at byte " + std::to_string(position) + ")");
  }

 private:
  bool in_map() const { return in_map_ && depth_ == 2; }
  bool stop(const std::string& why) {
    if (error.empty()) error = why;
    return false;
  }
  bool no_object() { return stop("has a weight_map that is no object"); }
  bool other() {
    if (map_next_) return no_object();
    return in_map() ? stop("has a file in its weight_map that is no string") : true;
  }
  bool enter(bool object) {
    if (depth_ == 0 && !object) return stop("is no JSON object");
    if (map_next_ && object) {
      map_next_ = false;
      in_map_ = true;
    } else if (!other()) {
      return false;
    }
    ++depth_;
    return true;
  }
  bool leave() {
    if (in_map()) in_map_ = false;
    --depth_;
    return true;
  }

  std::string key_;
  size_t depth_ = 0;
  size_t count_ = 0;
  bool map_next_ = false;  // the next value is that of "weight_map"
  bool in_map_ = false;
};

std::vector<Shard> shards_of_index(const std::string& path) {
  const files::File file(path);
  if (file.size() > files::kLongestHeader) {
    file.refuse("is longer than " + std::to_string(files::kLongestHeader) +
                " bytes, too long for an index of shards.");
  }
  IndexReader reader;
  // The parser calls parse_error() for a text that ends early.
  Json::sax_parse(file.read_text(0, file.size()), &reader);
  if (reader.error.empty() && !reader.has_map) reader.error = "has no weight_map";
  if (reader.error.empty() && reader.tensors.empty()) reader.error = "has an empty weight_map";
  if (!reader.error.empty()) {
    file.refuse("is not a valid index of safetensors files: it " + reader.error + ".");
  }
  std::vector<Shard> shards;
  const fs::path folder = fs::path(path).parent_path();
  for (auto& [name, tensors] : reader.tensors) {
    shards.push_back({(folder / name).string(), std::move(tensors)});
  }
  return shards;
}

// Refuses a folder without an index in which shards are missing, by their names
// ("model-00001-of-00003.safetensors"): a verdict on the rest would be none on the checkpoint.
void check_complete(const std::string& folder, const std::vector<std::string>& files) {
  static const std::regex kShard("(.*)-[0-9]{5}-of-([0-9]{5})[.]safetensors");
  std::map<std::pair<std::string, std::string>, size_t> found;  // by name and number of shards
  for (const std::string& file : files) {
    const std::string name = fs::path(file).filename().string();
    std::smatch parts;
    if (std::regex_match(name, parts, kShard)) ++found[{parts[1], parts[2]}];
  }
  for (const auto& [shards, count] : found) {
    if (count >= std::stoul(shards.second)) continue;
    throw Error(ErrorCode::kFile, "Folder '" + folder + "' has " + std::to_string(count) +
                                      " of the " + std::to_string(std::stoul(shards.second)) +
                                      " shards of " + files::in_quotes(shards.first) +
                                      "; name the files to inspect only these.");
  }
}

std::vector<Shard> shards_of_folder(const std::string& path) {
  std::vector<std::string> indices, files;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(kIndexEnding)) indices.push_back(it->path().string());
    if (name.ends_with(".safetensors")) files.push_back(it->path().string());
  }
  if (indices.size() == 1) return shards_of_index(indices[0]);
  if (indices.size() > 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "Folder '" + path + "' has several indices; name one of its *.safetensors.index.json.");
  }
  if (files.empty()) {
    throw Error(ErrorCode::kFile, "There is no safetensors file in the folder '" + path + "'.");
  }
  check_complete(path, files);
  std::sort(files.begin(), files.end());
  std::vector<Shard> shards;
  for (const std::string& file : files) shards.push_back({file, {}});
  return shards;
}

}  // namespace

std::vector<Shard> shards_of(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return shards_of_folder(path);
  if (path.ends_with(".json")) return shards_of_index(path);
  return {{path, {}}};
}

}  // namespace headroom::internal
