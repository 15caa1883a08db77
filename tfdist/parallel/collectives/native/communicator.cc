#include "communicator.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "reduction.h"
#include "transport.h"

namespace tfdist {
namespace {

const char* CollectiveName(int collective) {
  switch (collective) {
    case TFDIST_ALL_REDUCE:
      return "all_reduce";
    case TFDIST_REDUCE_SCATTER:
      return "reduce_scatter";
    case TFDIST_ALL_GATHER:
      return "all_gather";
    default:
      return "all_to_all";
  }
}

std::string Describe(const Header& header) {
  char text[256];
  snprintf(text, sizeof text, "%s '%.79s' of %llu bytes of %s in %d buffers (call %llu)",
           CollectiveName(header.collective), header.name,
           static_cast<unsigned long long>(header.bytes), DtypeName(header.dtype), header.buffers,
           static_cast<unsigned long long>(header.sequence));
  return text;
}

}  // namespace

double Now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

Communicator::Communicator(int rank, int size, const int* sockets, const char* const* names,
                           double timeout)
    : rank_(rank),
      size_(size),
      sockets_(sockets, sockets + size),
      waits_for_(new std::atomic<bool>[size]),
      names_(names, names + size),
      timeout_(timeout) {
  for (int r = 0; r < size; ++r) waits_for_[r] = false;
  for (int socket : sockets_) {
    if (socket < 0) continue;
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    const int one = 1;  // fails for UNIX sockets, which need no such option
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
}

Communicator::~Communicator() {
  for (int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

bool Communicator::Run(Call* call, std::string* error) {
  std::lock_guard<std::mutex> lock(running_);
  if (broken_.empty()) {
    call->header.sequence = ++sequence_;
    try {
      if (aborted_) throw Failure{AbortMessage()};
      Execute(*call);
    } catch (const Failure& failure) {
      broken_ = failure.message.empty() ? "aborted" : failure.message;
      // What has been sent still arrives, so that peers can compare their calls with this one.
      for (int socket : sockets_) {
        if (socket >= 0) shutdown(socket, SHUT_WR);
      }
    }
    for (int r = 0; r < size_; ++r) waits_for_[r] = false;
  }
  *error = broken_;
  return broken_.empty();
}

void Communicator::Abort(const std::string& message) {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  if (!aborted_) abort_message_ = message;
  aborted_ = true;  // waits look at it every kSliceMs
}

std::string Communicator::AbortMessage() const {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  return abort_message_;
}

std::vector<int> Communicator::WaitingFor() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    if (waits_for_[r]) ranks.push_back(r);
  }
  return ranks;
}

void Communicator::Compare(const Header& own, const Header& other, int peer) const {
  if (memcmp(&own, &other, sizeof own) == 0) return;
  throw Failure{"workers are out of step: " + name(rank_) + " calls " + Describe(own) + ", and " +
                name(peer) + " calls " + Describe(other) +
                ". All workers must run the same script with tensors of the same shapes"};
}

void Communicator::CheckWait(double* waited, double* last) const {
  if (aborted_) throw Failure{AbortMessage()};
  const double now = Now();
  // While this process is stopped, the clock goes on: such time does not count.
  if (*last > 0) *waited += std::min(now - *last, 2e-3 * kSliceMs);
  *last = now;
  if (timeout_ <= 0 || *waited <= timeout_) return;
  std::string late;
  for (int r : WaitingFor()) late += (late.empty() ? "" : ", ") + name(r);
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%g", timeout_);
  throw Failure{name(rank_) + " waited too long for " + late + ": nothing arrived for " + seconds +
                " s"};
}

bool Communicator::IsClosed(int peer) const {
  pollfd entry{sockets_[peer], POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0;
}

void Communicator::ThrowLost(int peer) const {
  // A process that dies lets others fail, which close their connections too, perhaps sooner than the
  // kernel those of the dead one. So wait a little, and name them all.
  poll(nullptr, 0, kLostMs);
  std::string lost = name(peer);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && r != peer && IsClosed(r)) lost += ", " + name(r);
  }
  throw Failure{name(rank_) + " lost its connection to " + lost +
                ": the process ended, or it failed; see its log"};
}

}  // namespace tfdist
