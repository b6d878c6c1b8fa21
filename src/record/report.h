// The report: a self-contained HTML page with the histories as JSON, reduced to what a screen can
// show, and a script that draws them.
#ifndef HEADROOM_SRC_RECORD_REPORT_H_
#define HEADROOM_SRC_RECORD_REPORT_H_

#include <deque>
#include <string>
#include <vector>

#include "record/history.h"

namespace headroom::internal {

struct ReportRun {
  std::string place;  // the run's folder, relative to the reported one
  const History* history = nullptr;
  bool cut = false;  // its last line is incomplete
};

/// The data of the page as JSON: a few megabytes at most, however long the runs are. `left_out` has
/// a sentence for each run that could not be read.
std::string report_data(const std::string& title, const std::vector<ReportRun>& runs,
                        const std::vector<std::string>& left_out = {});

/// The page with its data. A live page polls the server it came from for newer data.
std::string report_page(const std::string& title, const std::string& data, bool live);

/// The last component of the absolute path of a folder, without a trailing slash.
std::string folder_name(const std::string& folder);

/// The runs in a folder, in the order in which they were started.
struct FoundRuns {
  std::deque<HistoryReader> readers;  // a deque, because `runs` points into it
  std::vector<ReportRun> runs;
  std::vector<std::string> left_out;  // a sentence for each run that could not be read
};

/// Reads all runs in `folder` or below it. Throws Error(kFile) if there are none, and the first
/// error if none of them could be read.
FoundRuns read_runs(const std::string& folder);

/// The sorted paths of the histories in `folder` or below it. Throws Error(kFile) if there are
/// none.
std::vector<std::string> find_histories(const std::string& folder);

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_REPORT_H_
