// The advice on recorded runs, for several commands.
#ifndef HEADROOM_CLI_DIAGNOSE_H_
#define HEADROOM_CLI_DIAGNOSE_H_

#include <headroom/diagnose.h>

#include <string>

namespace headroom::cli {

/// Prints what diagnose() says about the runs in a folder. Returns the sentences on runs that were
/// left out.
std::vector<std::string> print_diagnoses(const std::string& folder);

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_DIAGNOSE_H_
