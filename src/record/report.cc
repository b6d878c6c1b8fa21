#include "record/report.h"

#include <headroom/error.h>
#include <headroom/record.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "files/write.h"
#include "record/assets.h"
#include "record/page.h"

namespace headroom {
namespace internal {
namespace {

constexpr int kDepth = 12;  // of nested folders that are searched for runs

// Escapes '<', so that no name of a tensor can end the <script> element around the JSON.
std::string for_script(const std::string& json) {
  std::string safe;
  safe.reserve(json.size());
  for (const char& c : json) safe += c == '<' ? "\\u003c" : std::string_view(&c, 1);
  return safe;
}

}  // namespace

// The script finds its data in an element of type application/json and draws into the others.
std::string report_page(const std::string& title, const std::string& data, bool live) {
  std::string body = "<style>";
  body += kReportStyle;
  body +=
      "</style>\n<header id=\"head\"></header>\n<main id=\"main\"></main>\n"
      "<div id=\"tip\" role=\"status\" hidden></div>\n"
      "<noscript><p>This report draws itself with JavaScript, which is switched off here.</p>"
      "</noscript>\n<script type=\"application/json\" id=\"data\"";
  if (live) body += " data-live=\"1\"";
  body += ">" + for_script(data) + "</script>\n<script>";
  for (const char* const script : kReportScripts) body += script;
  body += "</script>";
  return page(title, body);
}

std::vector<std::string> find_histories(const std::string& folder) {
  namespace fs = std::filesystem;
  const fs::path root(folder);
  std::error_code error;
  if (!fs::is_directory(root, error)) {
    throw Error(ErrorCode::kFile, "There is no folder '" + folder + "'.");
  }
  if (fs::is_regular_file(root / kHistoryFile, error)) return {(root / kHistoryFile).string()};
  std::vector<std::string> paths;
  fs::recursive_directory_iterator it(root, fs::directory_options::skip_permission_denied, error);
  for (const fs::recursive_directory_iterator end; !error && it != end; it.increment(error)) {
    if (it.depth() >= kDepth) it.disable_recursion_pending();
    std::error_code gone;
    // The iterator does not enter links to folders, but a linked folder may itself be a run.
    const bool link = it->is_symlink(gone) && it->is_directory(gone);
    const fs::path history = link ? it->path() / kHistoryFile : it->path();
    if (history.filename() == kHistoryFile && fs::is_regular_file(history, gone)) {
      paths.push_back(history.string());
    }
  }
  if (paths.empty()) {
    throw Error(ErrorCode::kFile, "There is no run in '" + folder + "' or below it: no " +
                                      kHistoryFile + " was found.");
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string folder_name(const std::string& folder) {
  const std::filesystem::path inside = std::filesystem::absolute(folder) / "x";
  return inside.lexically_normal().parent_path().filename().string();
}

FoundRuns read_runs(const std::string& folder) {
  namespace fs = std::filesystem;
  FoundRuns found;
  std::vector<Error> errors;
  for (const std::string& history : find_histories(folder)) {
    HistoryReader& reader = found.readers.emplace_back(history);
    try {
      reader.read_more();
      require(reader.lines() > 0, ErrorCode::kBadState,
              [&] { return history + ":1: the history's first line is missing or incomplete."; });
      found.runs.push_back({fs::path(history).parent_path().lexically_relative(folder).string(),
                            &reader.history(), reader.cut()});
    } catch (const Error& error) {  // a damaged run is left out as long as there is another one
      errors.push_back(error);
      found.left_out.emplace_back(error.what());
    }
  }
  if (found.runs.empty()) throw errors.front();
  std::stable_sort(found.runs.begin(), found.runs.end(),
                   [](const ReportRun& a, const ReportRun& b) {
                     return a.history->started < b.history->started;
                   });
  return found;
}

}  // namespace internal

void write_report(const std::string& folder, const std::string& path,
                  std::vector<std::string>* left_out) {
  internal::FoundRuns found = internal::read_runs(folder);
  const std::string title =
      found.runs.size() == 1 ? found.runs[0].history->name : internal::folder_name(folder);
  const std::string page =
      internal::report_page(title, internal::report_data(title, found.runs, found.left_out), false);
  // report.html is our own name; `path` is the user's and may be a link or device.
  if (path.empty()) {
    files::replace_file((std::filesystem::path(folder) / internal::kReportFile).string(), {page});
  } else {
    files::write_to(path, page);
  }
  if (left_out != nullptr) *left_out = std::move(found.left_out);
}

}  // namespace headroom
