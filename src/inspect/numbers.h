// Counts and shares as text, for tables and sentences.
#ifndef HEADROOM_SRC_INSPECT_NUMBERS_H_
#define HEADROOM_SRC_INSPECT_NUMBERS_H_

#include <cstdint>
#include <string>

namespace headroom::internal {

/// part / whole; 0 if both are 0.
double share(int64_t part, int64_t whole);
/// "0", "<1e-4 %", "0.0012 %", "12.34 %": eight characters at most.
std::string percent(int64_t part, int64_t whole);
/// "1,234,567".
std::string grouped(int64_t number);
/// Three significant digits: "0.0123", "1.02e+05".
std::string three_digits(double value);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_INSPECT_NUMBERS_H_
