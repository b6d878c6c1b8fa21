// The CUDA side of measure/.
#ifndef HEADROOM_SRC_MEASURE_CUDA_H_
#define HEADROOM_SRC_MEASURE_CUDA_H_

#include <vector>

#include "measure/kernels.h"

namespace headroom::internal {

/// Measures, and unscales if the job says so, tensors that are all on one CUDA device, and waits
/// for the result. The same list on the same kind of device gives the same bits. `out`'s culprit is
/// an index into `list`.
Partial cuda_measure(const std::vector<TensorView>& list, const MeasureJob& job);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_MEASURE_CUDA_H_
