#include "cli/serve.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <headroom/error.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <string_view>
#include <vector>

#include "record/report.h"

namespace headroom::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostClients = 32;
constexpr size_t kMostRequest = 8192;  // bytes
constexpr auto kClientTimeout = std::chrono::seconds(15);
constexpr auto kViewerGone = std::chrono::seconds(5);  // since the last request of the page
constexpr auto kLinger = std::chrono::seconds(4);      // for the page to fetch the last state

// The runs in a folder, read incrementally.
class Runs {
 public:
  /// Throws if there is no run that can be read.
  explicit Runs(const std::string& folder)
      : folder_(folder), title_(internal::folder_name(folder)) {
    search();
    read();
  }

  /// Adds new runs and removes deleted ones.
  void search() {
    std::map<std::string, Run> found;
    for (const std::string& path : internal::find_histories(folder_)) {
      auto known = runs_.extract(path);
      if (known.empty()) {
        found.emplace(path, Run{internal::HistoryReader(path), ""});
      } else {
        found.insert(std::move(known));
      }
    }
    for (const auto& [path, gone] : runs_) changes_ += gone.reader.lines() + 1;
    runs_ = std::move(found);
  }

  /// Throws if there is no run that can be read.
  void read() {
    size_t good = 0;
    for (auto& [path, run] : runs_) {
      std::string error_text;
      try {
        run.reader.read_more();
        ++good;
      } catch (const Error& error) {
        error_text = error.what();
      }
      changes_ += error_text != run.error;
      run.error = std::move(error_text);
    }
    if (good == 0) throw Error(ErrorCode::kBadState, runs_.begin()->second.error);
  }
  /// A version number of data(): lines read plus other changes. Never decreases.
  int64_t version() const {
    int64_t all = changes_;
    for (const auto& [path, run] : runs_) all += run.reader.lines();
    return all;
  }
  std::string title() const {
    return runs_.size() == 1 ? runs_.begin()->second.reader.history().name : title_;
  }
  std::string data() const {
    std::vector<internal::ReportRun> runs;
    std::vector<std::string> left_out;
    for (const auto& [path, run] : runs_) {
      if (!run.error.empty()) {
        left_out.push_back(run.error);
        continue;
      }
      const std::filesystem::path folder = std::filesystem::path(path).parent_path();
      runs.push_back(
          {folder.lexically_relative(folder_).string(), &run.reader.history(), run.reader.cut()});
    }
    return internal::report_data(title(), runs, left_out);
  }

 private:
  struct Run {
    internal::HistoryReader reader;
    std::string error;  // why it cannot be read; empty if it can
  };

  std::string folder_;
  std::string title_;
  std::map<std::string, Run> runs_;  // by the path of the history
  int64_t changes_ = 0;
};

struct Client {
  int socket;
  Clock::time_point until;
  std::string request;
  std::string answer;  // empty until the request is complete
  size_t sent = 0;
};

std::string response(const char* status, const std::string& body, const std::string& type,
                     const std::string& more = "") {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\nConnection: close\r\n{}\r\n{}",
      status, type, body.size(), more, body);
}

std::string refusal(const char* status, const std::string& more = "") {
  return response(status, fmt::format("{}\n", status), "text/plain", more);
}

// The value of an HTTP header, or an empty string. Header names are case-insensitive.
std::string_view header(std::string_view request, std::string_view name) {
  for (size_t at = request.find("\r\n"); at != std::string_view::npos;
       at = request.find("\r\n", at + 2)) {
    const std::string_view line = request.substr(at + 2, request.find("\r\n", at + 2) - at - 2);
    if (line.size() <= name.size() || line[name.size()] != ':') continue;
    if (strncasecmp(line.data(), name.data(), name.size()) != 0) continue;
    const size_t value = line.find_first_not_of(" \t", name.size() + 1);
    if (value == std::string_view::npos) return {};
    return line.substr(value, line.find_last_not_of(" \t") - value + 1);
  }
  return {};
}

class Server {
 public:
  Server(int listener, int port, Runs runs, const std::atomic<bool>* stop)
      : listener_(listener), port_(port), runs_(std::move(runs)), stop_(*stop) {}

  void run() {
    Clock::time_point stopped{};
    while (true) {
      const Clock::time_point now = Clock::now();
      if (stop_ && stopped == Clock::time_point{}) {
        stopped = now;
        read_last_state();
      }
      if (stop_ && (now - stopped > kLinger || (clients_.empty() && !page_is_behind(now)))) break;
      round(now);
    }
    for (const Client& client : clients_) ::close(client.socket);
  }

 private:
  void read_last_state() {
    try {
      runs_.read();
    } catch (const Error&) {  // the last state that was read remains
    }
  }

  // Whether an open page has not fetched the last state yet.
  bool page_is_behind(Clock::time_point now) const {
    return now - last_request_ < kViewerGone && sent_version_ != runs_.version();
  }

  // Waits up to 100 ms for sockets and serves those that are ready.
  void round(Clock::time_point now) {
    std::vector<pollfd> sockets = {{listener_, POLLIN, 0}};
    for (const Client& client : clients_) {
      sockets.push_back(
          {client.socket, static_cast<short>(client.answer.empty() ? POLLIN : POLLOUT), 0});
    }
    if (::poll(sockets.data(), sockets.size(), 100) < 0) return;
    size_t index = 1;
    for (auto client = clients_.begin(); client != clients_.end(); ++index) {
      const bool ready = sockets[index].revents != 0;
      const bool keep = now < client->until && (!ready || serve(*client));
      if (!keep) ::close(client->socket);
      client = keep ? std::next(client) : clients_.erase(client);
    }
    if (sockets[0].revents != 0) accept(now);
  }

  void accept(Clock::time_point now) {
    const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      if (errno == EMFILE || errno == ENFILE)
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return;
    }
    if (clients_.size() >= kMostClients && !drop_idle()) {
      ::close(socket);
    } else {
      clients_.push_back({socket, now + kClientTimeout, "", ""});
    }
  }

  // Drops the oldest client that has not completed its request.
  bool drop_idle() {
    const auto idle = std::find_if(clients_.begin(), clients_.end(),
                                   [](const Client& client) { return client.answer.empty(); });
    if (idle == clients_.end()) return false;
    ::close(idle->socket);
    clients_.erase(idle);
    return true;
  }

  // Reads a request or sends the answer. Returns false if the connection is to be closed.
  bool serve(Client& client) {
    if (client.answer.empty()) {
      char buffer[4096];
      const ssize_t read = ::recv(client.socket, buffer, sizeof buffer, 0);
      if (read < 0) return errno == EAGAIN || errno == EINTR;
      if (read == 0) return false;
      client.request.append(buffer, static_cast<size_t>(read));
      if (client.request.find("\r\n\r\n") == std::string::npos) {
        if (client.request.size() <= kMostRequest) return true;
        client.answer = refusal("431 Request Header Fields Too Large");
      } else {
        client.answer = answer(client.request);
      }
    }
    const ssize_t sent = ::send(client.socket, client.answer.data() + client.sent,
                                client.answer.size() - client.sent, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    client.sent += static_cast<size_t>(sent);
    if (client.sent < client.answer.size()) return true;
    ::shutdown(client.socket, SHUT_WR);
    return false;
  }

  // Host names are case-insensitive, and HTTP's default port may be omitted.
  bool is_own_host(std::string_view host) const {
    const auto is = [&](const std::string& own) {
      return host.size() == own.size() && strncasecmp(host.data(), own.data(), own.size()) == 0;
    };
    const std::string port = fmt::format(":{}", port_);
    return is("127.0.0.1" + port) || is("localhost" + port) ||
           (port_ == 80 && (is("127.0.0.1") || is("localhost")));
  }

  std::string answer(std::string_view request) {
    const std::string_view line = request.substr(0, request.find("\r\n"));
    const size_t space = line.find(' ');
    const size_t end = line.rfind(" HTTP/1.");
    if (space == std::string_view::npos || end == std::string_view::npos || end <= space) {
      return refusal("400 Bad Request");
    }
    if (line.substr(0, space) != "GET") return refusal("405 Method Not Allowed", "Allow: GET\r\n");
    // Against DNS rebinding: a site whose name resolves to 127.0.0.1 must not read the report.
    if (!is_own_host(header(request, "host"))) return refusal("403 Forbidden");
    const std::string_view target = line.substr(space + 1, end - space - 1);
    const std::string_view path = target.substr(0, target.find('?'));
    if (path != "/" && path != "/data") return refusal("404 Not Found");
    try {
      if (path == "/") runs_.search();
      runs_.read();
      if (path == "/") {
        return response("200 OK", internal::report_page(runs_.title(), runs_.data(), true),
                        "text/html; charset=utf-8");
      }
      return new_data(target);
    } catch (const std::exception& error) {
      return response("500 Internal Server Error", fmt::format("{}\n", error.what()), "text/plain");
    }
  }

  // "/data?lines=120": the data, unless the page already has version 120.
  std::string new_data(std::string_view target) {
    last_request_ = Clock::now();
    int64_t known = -1;
    const size_t query = target.find("?lines=");
    if (query != std::string_view::npos) {
      std::from_chars(target.data() + query + 7, target.data() + target.size(), known);
    }
    sent_version_ = runs_.version();
    if (known == sent_version_) return response("204 No Content", "", "text/plain");
    return response("200 OK", runs_.data(), "application/json",
                    fmt::format("X-Lines: {}\r\n", sent_version_));
  }

  int listener_;
  int port_;
  Runs runs_;
  const std::atomic<bool>& stop_;
  std::list<Client> clients_;
  Clock::time_point last_request_{};
  int64_t sent_version_ = 0;
};

}  // namespace

LiveReport::LiveReport(int port) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int yes = 1;
  ::setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (listener_ < 0 || ::bind(listener_, generic, length) != 0 || ::listen(listener_, 16) != 0 ||
      ::getsockname(listener_, generic, &length) != 0) {
    const std::string why = std::strerror(errno);
    if (listener_ >= 0) ::close(listener_);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("Port {} of 127.0.0.1 cannot be used: {}; choose another with --port, "
                            "or omit it.",
                            port, why));
  }
  port_ = ntohs(address.sin_port);
}

LiveReport::~LiveReport() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  ::close(listener_);
}

std::string LiveReport::url() const { return fmt::format("http://127.0.0.1:{}/", port_); }

void LiveReport::start(const std::string& folder) {
  auto server = std::make_shared<Server>(listener_, port_, Runs(folder), &stop_);
  thread_ = std::thread([server] { server->run(); });
}

}  // namespace headroom::cli
