#include "traced_pass.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace headroom::python {
namespace {

// Backward only passes the gradient on: not a suspect where a gradient is the sum of several.
bool passes_gradient_on(const std::string& operation) {
  static const std::set<std::string> kNames = {"add", "add_",  "sub", "sub_",
                                               "cat", "stack", "sum", "mean"};
  return kNames.count(operation) > 0;
}

// A gradient is named after the operations whose backward gave it.
void describe_gradient(const TracedPass::Op& op, const std::vector<const TracedPass::Op*>& users,
                       RangeRow* row) {
  std::vector<const TracedPass::Op*> suspects;
  std::copy_if(users.begin(), users.end(), std::back_inserter(suspects),
               [](const auto* user) { return !passes_gradient_on(user->operation); });
  if (suspects.empty()) suspects = users;
  row->direction = RangeDirection::kBackward;
  row->module = suspects.empty() ? op.module : suspects[0]->module;
  row->tensor = op.tensor.empty() ? op.operation : op.tensor;
  std::set<std::string> names;
  for (const auto* const user : suspects) {
    const std::string name =
        user->module == row->module ? user->operation : user->module + ": " + user->operation;
    if (!names.insert(name).second) continue;
    row->operation += row->operation.empty() ? name : " or " + name;
  }
}

}  // namespace

TracedPass::TracedPass() {
  ops_.reserve(1024);
  places_.reserve(1024);
}

TracedPass::Index TracedPass::add(Op op) {
  const Index index = op_count();
  for (const Index input : op.inputs) this->op(input).users.push_back(index);
  ops_.push_back(std::move(op));
  return index;
}

TracedPass::Index TracedPass::add(const Place& place) {
  const auto index = static_cast<Index>(places_.size());
  (place.backward ? op(place.op).grad_place : op(place.op).place) = index;
  places_.push_back(place);
  return index;
}

int64_t TracedPass::unmeasured() const {
  return std::count_if(places_.begin(), places_.end(),
                       [](const Place& place) { return place.row == kFull; });
}

RangeReport TracedPass::report(const std::vector<RangeStats>& stats) const {
  std::vector<std::pair<std::pair<Index, bool>, Index>> order;
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto place = static_cast<Index>(i);
    if (places_[i].row >= 0) order.push_back({time_of(place), place});
  }
  std::sort(order.begin(), order.end());
  std::vector<int64_t> rows(places_.size(), -1);  // of the report, by place
  for (size_t i = 0; i < order.size(); ++i) {
    rows[static_cast<size_t>(order[i].second)] = static_cast<int64_t>(i);
  }
  std::vector<RangeRow> described;
  described.reserve(order.size());
  for (const auto& [time, place] : order) {
    described.push_back(describe(place, rows));
    const int64_t row = places_[static_cast<size_t>(place)].row;
    described.back().stats = stats.at(static_cast<size_t>(row));
  }
  return RangeReport(std::move(described));
}

std::pair<TracedPass::Index, bool> TracedPass::time_of(Index index) const {
  const Place& place = places_[static_cast<size_t>(index)];
  const Op& op = this->op(place.op);
  if (!place.backward || op.source != RangeSource::kParameter) return {index, false};
  if (op.users.empty()) return {index, true};
  Index last = -1;
  for (const Index user : op.users) last = std::max(last, this->op(user).grad_place);
  const bool hidden = last < 0;  // by reentrant checkpointing: none of them is measured
  return {hidden ? index : last, true};
}

RangeRow TracedPass::describe(Index index, const std::vector<int64_t>& rows) const {
  const Place& place = places_[static_cast<size_t>(index)];
  const Op& op = this->op(place.op);
  RangeRow row;
  row.dtype = place.dtype;
  std::set<int64_t> inputs;
  const auto add_if_before = [&](Index input) {
    const int64_t found = input < 0 ? -1 : rows[static_cast<size_t>(input)];
    if (found < 0 || found >= rows[static_cast<size_t>(index)]) return false;
    inputs.insert(found);
    return true;
  };
  if (place.backward) {
    std::vector<const Op*> users;
    for (const Index user : op.users) {
      if (add_if_before(this->op(user).grad_place)) users.push_back(&this->op(user));
    }
    describe_gradient(op, users, &row);
  } else {
    for (const Index input : op.inputs) add_if_before(this->op(input).place);
    row.module = op.module;
    row.operation = op.operation;
    row.tensor = op.tensor;
    row.source = op.source;
  }
  row.inputs.assign(inputs.begin(), inputs.end());
  return row;
}

}  // namespace headroom::python
