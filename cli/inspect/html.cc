#include "cli/inspect/inspection.h"
namespace headroom::cli {
std::string html_page(const Inspection&) { return ""; }
}  // namespace headroom::cli
