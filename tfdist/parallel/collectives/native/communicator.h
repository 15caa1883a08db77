// Processes that are connected, and exchanges among them.
#ifndef TFDIST_COMMUNICATOR_H_
#define TFDIST_COMMUNICATOR_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "spans.h"

namespace tfdist {

constexpr int kSliceMs = 100;  // a wait looks this often whether its peer has died
constexpr int kLostMs = 200;   // after a peer is lost, others are looked at

// What a process says about its call. All processes must say the same.
struct Header {
  uint64_t sequence;  // number of the call
  uint64_t bytes;     // of the inputs
  int32_t collective;
  int32_t dtype;
  int32_t reduction;
  int32_t buffers;
  char name[80];  // ends with a zero
};

struct Call {
  Header header;
  int collective = 0;  // what an exchange does; the header may say what the whole call is
  Spans input;
  Spans output;
  double factor = 1;  // of the own input of a sum; 0 makes it zeros, whatever it holds
};

// A failed call. The message is for users.
struct Failure {
  std::string message;
};

// The connections to all processes of a job.
class Peers {
 public:
  Peers(int rank, int size, const int* sockets, const char* const* names, double timeout);
  ~Peers();

  // Throws unless a peer has made the same call.
  void Compare(const Header& own, const Header& other, int peer) const;
  // Throws if the call is to end. Counts the time of a wait, in which no progress was made.
  void CheckWait(double* waited, double* last) const;
  // Throws the failure for a peer that has closed its connection.
  [[noreturn]] void ThrowLost(int peer) const;
  bool IsClosed(int peer) const;
  // Tells all peers that this process sends nothing more. What has been sent still arrives.
  void CloseSending() const;

  void Abort(const std::string& message);
  void CheckAbort() const;  // throws after Abort

  void SetWaitsFor(int peer, bool waits) { waits_for_[peer] = waits; }
  void ClearWaits();
  std::vector<int> WaitingFor() const;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sockets_.size()); }
  int socket(int peer) const { return sockets_[peer]; }

 private:
  const int rank_;
  const std::vector<int> sockets_;  // by rank; -1 for the own one
  const std::vector<std::string> names_;
  const double timeout_;
  const std::unique_ptr<std::atomic<bool>[]> waits_for_;
  std::atomic<bool> aborted_{false};
  mutable std::mutex abort_mutex_;
  std::string abort_message_;
};

// A way to run collectives among some processes, its members, which are numbered in their order.
class Exchange {
 public:
  Exchange(Peers* peers, std::vector<int> members);
  virtual ~Exchange() = default;

  // Runs a call; throws Failure.
  virtual void Run(const Call& call) = 0;
  // Whether calls may have a factor other than 1.
  virtual bool CanScale() const { return false; }

 protected:
  Peers* const peers_;
  const std::vector<int> members_;  // ranks
  const int size_;                  // of the members
  int own_ = 0;                     // number of this process among them
};

class Communicator {
 public:
  Communicator(std::unique_ptr<Peers> peers, std::unique_ptr<Exchange> exchange)
      : peers_(std::move(peers)), exchange_(std::move(exchange)) {}

  // Runs one call at a time. Returns whether it succeeded; else `error` says why.
  bool Run(Call* call, std::string* error);

  Peers* peers() { return peers_.get(); }
  bool CanScale() const { return exchange_->CanScale(); }

 private:
  const std::unique_ptr<Peers> peers_;
  const std::unique_ptr<Exchange> exchange_;
  uint64_t sequence_ = 0;
  std::string broken_;  // message of the first failure
  std::mutex running_;  // held during a call
};

// Number of bytes before part `rank` of `bytes` bytes that are divided among `size` processes.
inline size_t PartBegin(size_t bytes, size_t width, int rank, int size) {
  return bytes / width * rank / size * width;
}

constexpr size_t kWholeBytes = 16 << 10;  // up to here, all members compute the whole sum

size_t SharedBytes(int size);
// Returns nullptr if the memory cannot be mapped.
std::unique_ptr<Exchange> MakeSharedMemoryExchange(Peers* peers, std::vector<int> members,
                                                   int memory);
std::unique_ptr<Exchange> MakeSocketExchange(Peers* peers, std::vector<int> members);
// Each host has equally many processes, which share memory; `hosts` are their ranks.
std::unique_ptr<Exchange> MakeHostsExchange(Peers* peers, std::vector<std::vector<int>> hosts,
                                            int memory);

// Seconds of a clock that only goes forward.
double Now();

}  // namespace tfdist
#endif  // TFDIST_COMMUNICATOR_H_
