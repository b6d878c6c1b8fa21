// A report that is served live while its runs go on.
#ifndef HEADROOM_CLI_SERVE_H_
#define HEADROOM_CLI_SERVE_H_

#include <atomic>
#include <string>
#include <thread>

namespace headroom::cli {

/// A small HTTP server on 127.0.0.1, in a thread of its own: GET / is the report of a folder, and
/// GET /data what is new in it. Everything else is refused, and a client that is slow or sends
/// nonsense only loses its own connection.
class LiveReport {
 public:
  /// Takes the port; 0: one that is free. Throws Error(kInvalidArgument) if it cannot be had.
  explicit LiveReport(int port);

  /// Serves until the end, after which a page that is open gets the last state.
  ~LiveReport();
  LiveReport(const LiveReport&) = delete;
  LiveReport& operator=(const LiveReport&) = delete;

  std::string url() const;

  /// Starts to serve the runs in `folder`; throws as write_report() does if there are none.
  void start(const std::string& folder);

 private:
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace headroom::cli

#endif  // HEADROOM_CLI_SERVE_H_
