// Serves a live report while its runs are training.
#ifndef HEADROOM_CLI_SERVE_H_
#define HEADROOM_CLI_SERVE_H_

#include <atomic>
#include <string>
#include <thread>

namespace headroom::cli {

/// A small HTTP server on 127.0.0.1 with its own thread. GET / returns the report of a folder, GET
/// /data its current data. All other requests are refused. A client that is slow or sends garbage
/// only loses its own connection.
class LiveReport {
 public:
  /// Opens the port; 0 chooses a free one. Throws Error(kInvalidArgument) if it cannot be used.
  explicit LiveReport(int port);

  /// Stops after an open page has fetched the last state, or after a few seconds.
  ~LiveReport();
  LiveReport(const LiveReport&) = delete;
  LiveReport& operator=(const LiveReport&) = delete;

  std::string url() const;

  /// Starts to serve the runs in `folder`. Throws like write_report() if there are none.
  void start(const std::string& folder);

 private:
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_SERVE_H_
