// A bigram softmax language model with a narrow embedding. Its loss is the mean over a large batch
// of N words, so the gradient of the logit of each word that did not follow is p/N, which
// underflows in FP16.
#include <fmt/format.h>
#include <headroom/error.h>
#include <headroom/libtorch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <sstream>

#include "cli/train/data.h"
#include "cli/train/layers.h"
#include "cli/train/random_state.h"
#include "cli/train/task.h"

namespace headroom::cli {
namespace {

constexpr int64_t kWords = 1024;
constexpr int64_t kSlice = 1024;  // tokens whose logits fit the caches

class BigramImpl : public torch::nn::Module {
 public:
  explicit BigramImpl(const TrainConfig& config) {
    embed_ = register_parameter("embed", torch::randn({kWords, config.width}));
    out_ = register_module("out", Dense(config.width, kWords, config));
  }

  torch::Tensor forward(const torch::Tensor& words) {
    return out_->forward(torch::embedding(embed_, words));
  }

 private:
  torch::Tensor embed_;
  Dense out_ = nullptr;
};
TORCH_MODULE(Bigram);

// A source of pairs of consecutive words.
class Pairs {
 public:
  virtual ~Pairs() = default;
  virtual void draw(int64_t count, std::mt19937_64& random, int64_t* before, int64_t* after) = 0;
};

// Words of eight classes. The next word follows Zipf's law over an order specific to the class.
class SyntheticPairs : public Pairs {
 public:
  SyntheticPairs() {
    std::vector<double> weights(kWords);
    for (int64_t k = 0; k < kWords; ++k) {
      weights[static_cast<size_t>(k)] = std::pow(static_cast<double>(k + 1), -1.2);
    }
    zipf_ = std::discrete_distribution<int64_t>(weights.begin(), weights.end());
    std::mt19937_64 random(8);
    for (auto& order : orders_) {
      order.resize(kWords);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
    }
  }

  void draw(int64_t count, std::mt19937_64& random, int64_t* before, int64_t* after) override {
    for (int64_t i = 0; i < count; ++i) {
      before[i] = static_cast<int64_t>(random() % kWords);
      after[i] = orders_[static_cast<size_t>(before[i] % 8)][static_cast<size_t>(zipf_(random))];
    }
  }

 private:
  std::discrete_distribution<int64_t> zipf_;
  std::array<std::vector<int64_t>, 8> orders_;
};

// The words of a text; the rarest share one id.
class TextPairs : public Pairs {
 public:
  explicit TextPairs(const std::string& path) {
    std::istringstream text(read_text(path));
    std::vector<std::string> words;
    std::map<std::string, int64_t> counts;
    for (std::string word; text >> word;) {
      ++counts[word];
      words.push_back(std::move(word));
    }
    if (words.size() < 2) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("'{}' has {} words; at least two are needed.", path, words.size()));
    }
    std::vector<std::pair<int64_t, std::string>> ranked;
    for (const auto& [word, count] : counts) ranked.emplace_back(-count, word);
    std::sort(ranked.begin(), ranked.end());
    std::map<std::string, int64_t> ids;
    for (size_t i = 0; i < ranked.size(); ++i) {
      ids[ranked[i].second] = std::min<int64_t>(static_cast<int64_t>(i), kWords - 1);
    }
    for (const std::string& word : words) ids_.push_back(ids[word]);
  }

  void draw(int64_t count, std::mt19937_64& random, int64_t* before, int64_t* after) override {
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = random() % (ids_.size() - 1);
      before[i] = ids_[at];
      after[i] = ids_[at + 1];
    }
  }

 private:
  std::vector<int64_t> ids_;
};

class LanguageModel : public Task {
 public:
  explicit LanguageModel(const TrainConfig& config)
      : device_(config.torch_device()),
        part_(config.part),
        batch_(config.batch / config.part.ranks),
        random_(config.seed) {
    if (config.data.empty()) {
      pairs_ = std::make_unique<SyntheticPairs>();
    } else {
      pairs_ = std::make_unique<TextPairs>(config.data);
    }
    torch::manual_seed(config.seed);
    model_ = Bigram(config);
  }

  torch::nn::Module& model() override { return *model_; }
  int64_t slices() const override { return (batch_ + kSlice - 1) / kSlice; }

  void next_batch() override {
    const auto [before, after] = draw(batch_ * part_.ranks, random_);
    before_ = part_.of(before);
    after_ = part_.of(after);
  }

  torch::Tensor loss(int64_t slice) override {
    const int64_t begin = slice * kSlice;
    const int64_t end = std::min(begin + kSlice, batch_);
    return sum(before_.slice(0, begin, end), after_.slice(0, begin, end)) / batch_;
  }

  std::string data_position() const override { return random_state(random_); }
  void set_data_position(const std::string& text) override { set_random_state(random_, text); }

  Score score() override {
    const torch::NoGradGuard no_grad;
    std::mt19937_64 random(99);
    constexpr int64_t kTest = 65536;
    const auto [before, after] = draw(kTest, random);
    double total = 0.0;
    for (int64_t i = 0; i < kTest; i += kSlice) {
      total += sum(before.slice(0, i, i + kSlice), after.slice(0, i, i + kSlice)).item<double>();
    }
    const double loss = total / kTest;
    return {loss, std::exp(loss)};
  }

  std::string metric_name() const override { return "perplexity"; }

 private:
  torch::Tensor sum(const torch::Tensor& before, const torch::Tensor& after) {
    return torch::nn::functional::cross_entropy(
        libtorch::cast(model_->forward(before), torch::kFloat), after,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  }

  std::pair<torch::Tensor, torch::Tensor> draw(int64_t count, std::mt19937_64& random) {
    const torch::Tensor before = torch::empty({count}, torch::kLong);
    const torch::Tensor after = torch::empty({count}, torch::kLong);
    pairs_->draw(count, random, before.data_ptr<int64_t>(), after.data_ptr<int64_t>());
    return {before.to(device_), after.to(device_)};
  }

  torch::Device device_;
  Part part_;
  int64_t batch_;  // of this rank
  std::mt19937_64 random_;
  std::unique_ptr<Pairs> pairs_;
  torch::Tensor before_, after_;
  Bigram model_ = nullptr;
};

}  // namespace

std::unique_ptr<Task> make_lm(const TrainConfig& config) {
  return std::make_unique<LanguageModel>(config);
}

}  // namespace headroom::cli
