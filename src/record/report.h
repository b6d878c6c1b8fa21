// The report: histories thinned out to what a screen can show, as JSON inside one HTML page.
#ifndef HEADROOM_SRC_RECORD_REPORT_H_
#define HEADROOM_SRC_RECORD_REPORT_H_

#include <string>
#include <vector>

#include "record/history.h"

namespace headroom::internal {

struct ReportRun {
  std::string place;  // its folder, below the one that is reported on
  const History* history = nullptr;
  bool cut = false;  // its last line is
};

/// What the page shows, as JSON: at most a few megabytes, however long the runs are. `left_out`:
/// sentences on runs that could not be read.
std::string report_data(const std::string& title, const std::vector<ReportRun>& runs,
                        const std::vector<std::string>& left_out = {});

/// The page with its data. A live one asks the server it came from for newer data.
std::string report_page(const std::string& title, const std::string& data, bool live);

/// Paths of the histories in `folder` or in the folders below it, in order. Error(kFile) if there
/// are none.
std::vector<std::string> find_histories(const std::string& folder);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_REPORT_H_
