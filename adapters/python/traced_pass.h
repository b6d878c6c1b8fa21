// TracedPass: the operations of one forward and backward pass, what was measured of them, and in
// which order. Knows nothing of Python.
#ifndef HEADROOM_ADAPTERS_PYTHON_TRACED_PASS_H_
#define HEADROOM_ADAPTERS_PYTHON_TRACED_PASS_H_

#include <headroom/ranges.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace headroom::python {

class TracedPass {
 public:
  using Index = int32_t;  // of an operation or place

  static constexpr int64_t kFull = -1;        // instead of a row: the table has no room
  static constexpr int64_t kUnreadable = -2;  // the tensor has no memory that can be read

  /// An operation, parameter or input.
  struct Op {
    std::string module, operation, tensor;
    RangeSource source = RangeSource::kOperation;
    std::vector<Index> inputs = {}, users = {};
    Index place = -1, grad_place = -1;
  };

  /// A measured tensor. Places are in program order.
  struct Place {
    Index op;
    bool backward;
    DType dtype;
    int64_t row;  // of the table
  };

  TracedPass();

  Op& op(Index index) { return ops_[static_cast<size_t>(index)]; }
  const Op& op(Index index) const { return ops_[static_cast<size_t>(index)]; }
  Place& place(Index index) { return places_[static_cast<size_t>(index)]; }
  Index op_count() const { return static_cast<Index>(ops_.size()); }

  /// Adds an operation, which becomes a user of its inputs.
  Index add(Op op);

  /// Adds a place and notes it in its operation.
  Index add(const Place& place);

  /// Places for which the table had no room.
  int64_t unmeasured() const;

  /// In program order; the gradient of a parameter stands with those of what it was used for.
  RangeReport report(const std::vector<RangeStats>& stats) const;

 private:
  std::pair<Index, bool> time_of(Index place) const;
  RangeRow describe(Index place, const std::vector<int64_t>& rows) const;

  std::vector<Op> ops_;
  std::vector<Place> places_;
};

}  // namespace headroom::python

#endif  // HEADROOM_ADAPTERS_PYTHON_TRACED_PASS_H_
