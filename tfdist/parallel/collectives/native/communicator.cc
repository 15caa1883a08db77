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

Peers::Peers(int rank, int size, const int* sockets, const char* const* names, double timeout)
    : rank_(rank),
      sockets_(sockets, sockets + size),
      names_(names, names + size),
      timeout_(timeout),
      waits_for_(new std::atomic<bool>[size]) {
  ClearWaits();
  for (int socket : sockets_) {
    if (socket < 0) continue;
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    const int one = 1;  // fails for UNIX sockets, which need no such option
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
}

Peers::~Peers() {
  for (int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
}

void Peers::CloseSending() const {
  for (int socket : sockets_) {
    if (socket >= 0) shutdown(socket, SHUT_WR);
  }
}

void Peers::Abort(const std::string& message) {
  std::lock_guard<std::mutex> lock(abort_mutex_);
  if (!aborted_) abort_message_ = message;
  aborted_ = true;  // waits look at it every kSliceMs
}

void Peers::CheckAbort() const {
  if (!aborted_) return;
  std::lock_guard<std::mutex> lock(abort_mutex_);
  throw Failure{abort_message_};
}

void Peers::ClearWaits() {
  for (int r = 0; r < size(); ++r) waits_for_[r] = false;
}

std::vector<int> Peers::WaitingFor() const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (waits_for_[r]) ranks.push_back(r);
  }
  return ranks;
}

void Peers::Compare(const Header& own, const Header& other, int peer) const {
  if (memcmp(&own, &other, sizeof own) == 0) return;
  throw Failure{"workers are out of step: " + names_[rank_] + " calls " + Describe(own) + ", and " +
                names_[peer] + " calls " + Describe(other) +
                ". All workers must run the same script with tensors of the same shapes"};
}

void Peers::CheckWait(double* waited, double* last) const {
  CheckAbort();
  const double now = Now();
  // While this process is stopped, the clock goes on: such time does not count.
  if (*last > 0) *waited += std::min(now - *last, 2e-3 * kSliceMs);
  *last = now;
  if (timeout_ <= 0 || *waited <= timeout_) return;
  std::string late;
  for (int r : WaitingFor()) late += (late.empty() ? "" : ", ") + names_[r];
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%g", timeout_);
  throw Failure{names_[rank_] + " waited too long for " + late + ": nothing arrived for " + seconds +
                " s"};
}

bool Peers::IsClosed(int peer) const {
  pollfd entry{sockets_[peer], POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0;
}

void Peers::ThrowLost(int peer) const {
  // A process that dies lets others fail, which close their connections too, perhaps sooner than the
  // kernel those of the dead one. So wait a little, and name them all.
  poll(nullptr, 0, kLostMs);
  std::string lost = names_[peer];
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && r != peer && IsClosed(r)) lost += ", " + names_[r];
  }
  throw Failure{names_[rank_] + " lost its connection to " + lost +
                ": the process ended, or it failed; see its log"};
}

Exchange::Exchange(Peers* peers, std::vector<int> members)
    : peers_(peers), members_(std::move(members)), size_(static_cast<int>(members_.size())) {
  while (members_[own_] != peers->rank()) ++own_;
}

bool Communicator::Run(Call* call, std::string* error) {
  std::lock_guard<std::mutex> lock(running_);
  if (broken_.empty()) {
    call->header.sequence = ++sequence_;
    try {
      peers_->CheckAbort();
      exchange_->Run(*call);
    } catch (const Failure& failure) {
      broken_ = failure.message.empty() ? "aborted" : failure.message;
      peers_->CloseSending();  // so that peers can compare their calls with this one
    }
    peers_->ClearWaits();
  }
  *error = broken_;
  return broken_.empty();
}

}  // namespace tfdist
