// The text form of faults: overflow:p=0.01,nan:step=5.
#include <headroom/inject.h>

#include <charconv>

#include "core/check.h"
#include "files/file.h"

namespace headroom {
namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument, sentence);
}

// Returns false unless the whole text is a number of this type.
template <typename T>
bool read_number(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// The kind of a fault by its name; throws for an unknown one.
FaultKind kind_of(std::string_view name) {
  if (name == "overflow") return FaultKind::kOverflow;
  if (name == "nan") return FaultKind::kNan;
  if (name == "flip") return FaultKind::kFlip;
  refuse("There is no fault " + files::in_quotes(name) + "; there are overflow, nan and flip.");
}

// A step, or the first and the last of a range: 5, 10-20.
bool read_steps(std::string_view text, Fault* fault) {
  const size_t dash = text.find('-');
  if (!read_number(text.substr(0, dash), &fault->first_step)) return false;
  fault->last_step = fault->first_step;
  return dash == std::string_view::npos || read_number(text.substr(dash + 1), &fault->last_step);
}

// Applies one entry, such as "p=0.01", to the fault.
void set(std::string_view entry, Fault* fault) {
  const size_t equals = entry.find('=');
  const std::string_view key = entry.substr(0, equals);
  const std::string_view value =
      equals == std::string_view::npos ? std::string_view() : entry.substr(equals + 1);
  const auto expect = [&](bool ok, const char* what) {
    if (!ok) refuse("The fault's entry " + files::in_quotes(entry) + " needs " + what + ".");
  };
  if (key == "p") {
    expect(read_number(value, &fault->probability), "a probability, as in p=0.01");
  } else if (key == "tensor") {
    expect(!value.empty(), "the name of a parameter");
    fault->tensor = value;
  } else if (key == "step") {
    expect(read_steps(value, fault), "a step or a range, as in step=5 or step=10-20");
  } else if (key == "rank") {
    expect(read_number(value, &fault->rank) && fault->rank >= 0,
           "a rank of 0 or more, as in rank=1");
  } else if (key == "count") {
    expect(read_number(value, &fault->count), "a number of elements, as in count=3");
  } else {
    refuse("A fault has no entry " + files::in_quotes(key) +
           "; it has p, tensor, step, rank and count.");
  }
}

}  // namespace

// Splits the text at commas. An entry with a kind starts a new fault; the others belong to the last
// one.
std::vector<Fault> parse_faults(std::string_view text) {
  std::vector<Fault> faults;
  while (true) {
    const size_t comma = text.find(',');
    std::string_view entry = text.substr(0, comma);
    const size_t colon = entry.find(':');
    const size_t equals = entry.find('=');
    // An entry begins with a kind if it has a colon before '=', or no '=' at all.
    if (colon < equals || equals == std::string_view::npos) {
      faults.push_back({});
      faults.back().kind = kind_of(entry.substr(0, colon));
      entry = colon == std::string_view::npos ? std::string_view() : entry.substr(colon + 1);
    }
    if (faults.empty()) {
      refuse("The list of faults begins with " + files::in_quotes(entry) +
             "; begin with a kind, as in overflow:p=0.01.");
    }
    if (!entry.empty()) set(entry, &faults.back());
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  (void)Injector(faults);  // validates the values
  return faults;
}

}  // namespace headroom
