// None of these cases may compile.
#include <headroom/headroom.h>

namespace hr = headroom;

void misuse(int* integers, hr::f16 half, hr::AdamW& optimizer) {
#if defined(CASE_INTEGER_VIEW)
  hr::view(integers, 3);
#elif defined(CASE_IMPLICIT_WIDENING)
  float wide = half;
#elif defined(CASE_IMPLICIT_NARROWING)
  hr::f16 narrow = 1.0f;
#elif defined(CASE_COPIED_OPTIMIZER)
  hr::AdamW copy = optimizer;
#elif defined(CASE_ABSTRACT_OPTIMIZER)
  hr::Optimizer abstract({});
#endif
}
