// MpiRanks: one reduction is MPI_Ireduce and MPI_Ibcast of one block of doubles. Both are
// nonblocking, because MPI_Allreduce has no time limit.
#include <headroom/error.h>
#include <headroom/mpi.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace headroom::mpi {
namespace {

using Clock = std::chrono::steady_clock;

// A waiting rank polls without sleeping for kBusy, which covers ranks that are nearly in step. Then
// it sleeps for kSleep between two polls, to leave the core to other work.
constexpr auto kBusy = std::chrono::milliseconds(2);
constexpr auto kSleep = std::chrono::microseconds(50);

void check(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(ErrorCode::kRankLost, std::string(call) + " failed: " + std::string(text) +
                                        "; another rank has exited, or the network has failed.");
}

// The MPI_Op. A block is an MPI_Datatype of doubles: the number of sums, the sums, the maxima. One
// operation on one block keeps sums and maxima in a single message.
void combine(void* from, void* to, int* blocks, MPI_Datatype* type) {
  int bytes = 0;
  MPI_Type_size(*type, &bytes);
  const size_t count = static_cast<size_t>(bytes) / sizeof(double);
  for (int block = 0; block < *blocks; ++block) {
    const double* const theirs = static_cast<double*>(from) + static_cast<size_t>(block) * count;
    double* const ours = static_cast<double*>(to) + static_cast<size_t>(block) * count;
    const size_t sums = static_cast<size_t>(ours[0]);
    for (size_t i = 1; i <= sums; ++i) ours[i] += theirs[i];
    for (size_t i = sums + 1; i < count; ++i) ours[i] = std::max(ours[i], theirs[i]);
  }
}

}  // namespace

struct MpiRanks::Exchange {
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Op op = MPI_OP_NULL;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  size_t type_count = 0;             // number of doubles in `type`
  std::vector<double> mine, result;  // must not move while a request is active
  bool lost = false;                 // a request may never complete

  ~Exchange() {  // MPI objects cannot be freed after MPI_Finalize
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    if (type != MPI_DATATYPE_NULL) MPI_Type_free(&type);
    if (op != MPI_OP_NULL) MPI_Op_free(&op);
    if (communicator != MPI_COMM_NULL) MPI_Comm_free(&communicator);
  }

  // Makes `type` a block of this many doubles.
  void set_count(size_t count) {
    if (count == type_count) return;
    if (type != MPI_DATATYPE_NULL) check(MPI_Type_free(&type), "MPI_Type_free");
    check(MPI_Type_contiguous(static_cast<int>(count), MPI_DOUBLE, &type), "MPI_Type_contiguous");
    check(MPI_Type_commit(&type), "MPI_Type_commit");
    type_count = count;
  }

  // Waits for a request. Throws Error(kRankLost) when the time limit is exceeded.
  void wait(MPI_Request* request, Clock::time_point start, std::chrono::milliseconds limit) {
    for (int done = 0;;) {
      check(MPI_Test(request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) return;
      const auto waited = Clock::now() - start;
      if (waited > limit) {
        throw_did_not_come("within " + std::to_string(limit.count()) + " ms");
      }
      if (waited > kBusy) {
        std::this_thread::sleep_for(kSleep);
      } else {
        std::this_thread::yield();
      }
    }
  }
};

// MPI_ERRORS_RETURN: a failed call returns a status, which check() throws, instead of ending the
// job.
MpiRanks::MpiRanks(MPI_Comm communicator, std::chrono::milliseconds time_limit)
    : time_limit_(time_limit), exchange_(std::make_unique<Exchange>()) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) {
    throw Error(ErrorCode::kWrongOrder,
                "MpiRanks was created before MPI_Init; call MPI_Init first.");
  }
  if (time_limit <= std::chrono::milliseconds(0)) {
    throw Error(ErrorCode::kInvalidArgument, "MpiRanks needs a time limit above 0.");
  }
  check(MPI_Comm_dup(communicator, &exchange_->communicator), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(exchange_->communicator, MPI_ERRORS_RETURN);
  check(MPI_Op_create(combine, 1, &exchange_->op), "MPI_Op_create");
  check(MPI_Comm_rank(exchange_->communicator, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(exchange_->communicator, &size_), "MPI_Comm_size");
}

MpiRanks::~MpiRanks() {
  // MPI may still write to the memory of a request that has not completed: leak it.
  if (exchange_->lost) static_cast<void>(exchange_.release());
}

// Reduce and broadcast share one time limit. Rank 0's result is broadcast, because an all-reduce
// may add in a different order on each rank.
void MpiRanks::reduce(double* sums, size_t sum_count, double* maxima, size_t maximum_count) {
  Exchange& exchange = *exchange_;
  if (exchange.lost) throw_lost_before();
  exchange.mine.assign(1, static_cast<double>(sum_count));
  exchange.mine.insert(exchange.mine.end(), sums, sums + sum_count);
  exchange.mine.insert(exchange.mine.end(), maxima, maxima + maximum_count);
  exchange.result = exchange.mine;
  exchange.lost = true;  // cleared on success
  exchange.set_count(exchange.mine.size());
  const auto start = Clock::now();
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ireduce(exchange.mine.data(), exchange.result.data(), 1, exchange.type, exchange.op, 0,
                    exchange.communicator, &request),
        "MPI_Ireduce");
  exchange.wait(&request, start, time_limit_);
  check(MPI_Ibcast(exchange.result.data(), 1, exchange.type, 0, exchange.communicator, &request),
        "MPI_Ibcast");
  exchange.wait(&request, start, time_limit_);
  exchange.lost = false;
  std::copy_n(exchange.result.begin() + 1, sum_count, sums);
  std::copy_n(exchange.result.begin() + 1 + static_cast<ptrdiff_t>(sum_count), maximum_count,
              maxima);
}

}  // namespace headroom::mpi
