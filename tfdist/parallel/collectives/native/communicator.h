// What the communicators over shared memory and over sockets have in common.
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
  Spans input;
  Spans output;
};

// A failed call. The message is for users.
struct Failure {
  std::string message;
};

class Communicator {
 public:
  Communicator(int rank, int size, const int* sockets, const char* const* names, double timeout);
  virtual ~Communicator();

  // Runs one call at a time. Returns whether it succeeded; else `error` says why.
  bool Run(Call* call, std::string* error);

  void Abort(const std::string& message);
  std::vector<int> WaitingFor() const;
  int size() const { return size_; }

 protected:
  // Runs a call; throws Failure.
  virtual void Execute(Call& call) = 0;

  // Throws unless a peer has made the same call.
  void Compare(const Header& own, const Header& other, int peer) const;
  // Throws if the call is to end. Counts the time of a wait, in which no progress was made.
  void CheckWait(double* waited, double* last) const;
  // Throws the failure for a peer that has closed its connection.
  [[noreturn]] void ThrowLost(int peer) const;
  bool IsClosed(int peer) const;

  const std::string& name(int rank) const { return names_[rank]; }

  const int rank_;
  const int size_;
  std::vector<int> sockets_;  // by rank; -1 for the own one
  std::unique_ptr<std::atomic<bool>[]> waits_for_;

 private:
  std::string AbortMessage() const;

  std::vector<std::string> names_;
  const double timeout_;
  uint64_t sequence_ = 0;
  std::string broken_;  // message of the first failure
  std::mutex running_;  // held during a call
  std::atomic<bool> aborted_{false};
  mutable std::mutex abort_mutex_;
  std::string abort_message_;
};

// Number of bytes before part `rank` of `bytes` bytes that are divided among `size` processes.
inline size_t PartBegin(size_t bytes, size_t width, int rank, int size) {
  return bytes / width * rank / size * width;
}

size_t SharedBytes(int size);
std::unique_ptr<Communicator> MakeSharedMemoryCommunicator(int rank, int size, const int* sockets,
                                                           int memory, const char* const* names,
                                                           double timeout);
std::unique_ptr<Communicator> MakeSocketCommunicator(int rank, int size, const int* sockets,
                                                     const char* const* names, double timeout);

// Seconds of a clock that only goes forward.
double Now();

}  // namespace tfdist
#endif  // TFDIST_COMMUNICATOR_H_
