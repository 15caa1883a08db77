// Collectives of processes on one host, through memory that they share.
//
// Each process owns some slots of that memory, and writes only there. Data moves in rounds, each of
// which fills one slot of each process:
//
//   1. Every process posts its input in its slot.
//   2. It reads what the others have posted: it copies it into its output, or reduces it.
//   3. In a large all-reduce, it reduces only its part, publishes the result in its slot, and reads
//      the other parts of the result from the slots of the others.
//
// Counters say how far each process is. A slot may be written again after all processes are done with
// the round that used it. A process that would have to wait for a round goes on with later ones while
// it has slots: on a busy machine, its peer may not run for a while. There are so few slots that their
// data stays in the processor's caches.
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "communicator.h"
#include "reduction.h"
#include "transport.h"

namespace tfdist {
namespace {

constexpr size_t kSlotBytes = 128 << 10;
constexpr uint32_t kSlots = 8;
constexpr int kSpins = 2000;              // looks at a counter, some 50 us, before the process sleeps
constexpr size_t kWholeBytes = 16 << 10;  // up to here, all processes compute the whole sum
constexpr size_t kPage = 4096;

using Counter = std::atomic<uint32_t>;
static_assert(Counter::is_always_lock_free, "counters must work between processes");

// What a process tells the others, in its first page of the shared memory.
struct Board {
  alignas(64) Counter posted;     // rounds whose input it has posted
  alignas(64) Counter published;  // rounds whose result it has published
  alignas(64) Counter done;       // rounds whose slots it has read
  alignas(64) Counter sleepers;   // processes that may sleep until one of these changes
  // Of the last two calls: a process can be one call ahead of another.
  alignas(64) Header headers[2];
};
static_assert(sizeof(Board) <= kPage, "a board must fit in a page");

long Futex(Counter* counter, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(counter), operation, value, timeout, nullptr,
                 0);
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class SharedMemoryCommunicator : public Communicator {
 public:
  SharedMemoryCommunicator(int rank, int size, const int* sockets, char* memory,
                           const char* const* names, double timeout)
      : Communicator(rank, size, sockets, names, timeout), memory_(memory) {}

  ~SharedMemoryCommunicator() override { munmap(memory_, SharedBytes(size_)); }

 protected:
  void Execute(Call& call) override {
    const Header& header = call.header;
    const bool rows =
        header.collective == TFDIST_REDUCE_SCATTER || header.collective == TFDIST_ALL_TO_ALL;
    // Bytes that travel to each process, and how many of them in a round.
    const size_t total = rows ? header.bytes / size_ : header.bytes;
    const size_t per_round = rows ? kSlotBytes / size_ / 64 * 64 : kSlotBytes;
    const uint32_t rounds = static_cast<uint32_t>((total + per_round - 1) / per_round);
    const uint32_t first = next_round_;
    const uint32_t last = first + std::max<uint32_t>(1, rounds);  // also without data, they meet
    board(rank_)->headers[header.sequence % 2] = header;

    const bool publishes = header.collective == TFDIST_ALL_REDUCE && !IsWhole(header);
    auto offset = [&](uint32_t round) { return (round - first) * per_round; };
    auto bytes = [&](uint32_t round) { return std::min(per_round, total - offset(round)); };
    // Rounds below these numbers are posted, read and done. The oldest round goes first.
    uint32_t posted = first, read = first, done = first;
    while (done != last) {
      const bool can_post = posted != last && posted - done < kSlots;
      if (read != done && AllReached(&Board::published, done + 1)) {
        Gather(call, done, offset(done), bytes(done));
        Advance(&Board::done, ++done);
      } else if (posted != read && AllReached(&Board::posted, read + 1)) {
        for (int r = 0; r < size_ && read == first; ++r) {
          if (r != rank_) Compare(header, board(r)->headers[header.sequence % 2], r);
        }
        Read(call, read, offset(read), bytes(read));
        ++read;
        if (publishes) {
          Advance(&Board::published, read);
        } else {
          Advance(&Board::done, done = read);
        }
      } else if (can_post && AllReached(&Board::done, posted + 1 - kSlots)) {
        Post(call, posted, offset(posted), bytes(posted));
        Advance(&Board::posted, ++posted);
      } else if (read != done) {
        AwaitAll(&Board::published, done + 1);
      } else if (posted != read) {
        AwaitAll(&Board::posted, read + 1);
      } else {
        AwaitAll(&Board::done, posted + 1 - kSlots);
      }
    }
    next_round_ = last;
  }

 private:
  Board* board(int rank) const { return reinterpret_cast<Board*>(memory_ + kPage * rank); }

  char* slot(int rank, uint32_t round) const {
    return memory_ + kPage * size_ + (size_t(rank) * kSlots + round % kSlots) * kSlotBytes;
  }

  static bool IsWhole(const Header& header) { return header.bytes <= kWholeBytes; }

  // Writes a round's input into the own slot.
  void Post(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    char* own = slot(rank_, round);
    const size_t width = ElementBytes(call.header.dtype);
    switch (call.header.collective) {
      case TFDIST_ALL_REDUCE:
        if (IsWhole(call.header)) {
          call.input.CopyTo(own, offset, bytes);
        } else {  // all but the part that this process reduces
          const size_t begin = PartBegin(bytes, width, rank_, size_);
          const size_t end = PartBegin(bytes, width, rank_ + 1, size_);
          call.input.CopyTo(own, offset, begin);
          call.input.CopyTo(own + end, offset + end, bytes - end);
        }
        break;
      case TFDIST_ALL_GATHER:
        call.input.CopyTo(own, offset, bytes);
        break;
      default:  // a part of each row, one after the other
        for (int r = 0; r < size_; ++r) {
          if (r == rank_) continue;
          call.input.CopyTo(own + r * bytes, call.header.bytes / size_ * r + offset, bytes);
        }
    }
  }

  // Makes a round's output from the slots of all processes; of a large all-reduce, the own part.
  void Read(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    const Header& header = call.header;
    const size_t width = ElementBytes(header.dtype);
    switch (header.collective) {
      case TFDIST_ALL_REDUCE:
        if (IsWhole(header)) {
          ReduceSlots(call, round, 0, offset, offset, bytes, nullptr);
        } else {
          const size_t begin = PartBegin(bytes, width, rank_, size_);
          const size_t end = PartBegin(bytes, width, rank_ + 1, size_);
          ReduceSlots(call, round, begin, offset + begin, offset + begin, end - begin,
                      slot(rank_, round) + begin);
        }
        break;
      case TFDIST_REDUCE_SCATTER:
        ReduceSlots(call, round, rank_ * bytes, header.bytes / size_ * rank_ + offset, offset, bytes,
                    nullptr);
        break;
      case TFDIST_ALL_GATHER:
        for (int r = 0; r < size_; ++r) {
          call.output.CopyFrom(slot(r, round), header.bytes * r + offset, bytes);
        }
        break;
      default: {
        const size_t row = header.bytes / size_;
        for (int r = 0; r < size_; ++r) {
          if (r != rank_) {
            call.output.CopyFrom(slot(r, round) + rank_ * bytes, row * r + offset, bytes);
          } else if (bytes > 0) {
            size_t room;  // a row has one buffer
            call.output.CopyFrom(call.input.At(row * r + offset, &room), row * r + offset, bytes);
          }
        }
      }
    }
  }

  // Copies the other processes' parts of a large all-reduce.
  void Gather(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    const size_t width = ElementBytes(call.header.dtype);
    for (int i = 1; i < size_; ++i) {
      const int r = (rank_ + i) % size_;
      const size_t begin = PartBegin(bytes, width, r, size_);
      const size_t end = PartBegin(bytes, width, r + 1, size_);
      call.output.CopyFrom(slot(r, round) + begin, offset + begin, end - begin);
    }
  }

  // Reduces the own input and bytes of the others' slots, in the order of the ranks.
  void ReduceSlots(const Call& call, uint32_t round, size_t in_slot, size_t in_input,
                   size_t in_output, size_t bytes, char* copy) {
    std::vector<const void*> sources(size_);
    while (bytes > 0) {
      size_t room, output_room;
      const char* own = call.input.At(in_input, &room);
      char* output = call.output.At(in_output, &output_room);
      const size_t n = std::min({room, output_room, bytes});
      for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? own : slot(r, round) + in_slot;
      Reduce(call.header.dtype, call.header.reduction, sources.data(), size_, n, output, copy);
      in_slot += n;
      in_input += n;
      in_output += n;
      if (copy) copy += n;
      bytes -= n;
    }
  }

  // Sets an own counter, and wakes the processes that sleep for it.
  void Advance(Counter Board::*counter, uint32_t value) {
    (board(rank_)->*counter).store(value, std::memory_order_seq_cst);
    if (board(rank_)->sleepers.load(std::memory_order_seq_cst) > 0) {
      Futex(&(board(rank_)->*counter), FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  static bool Reached(const Counter& counter, uint32_t value) {  // counters wrap around
    return static_cast<int32_t>(counter.load(std::memory_order_acquire) - value) >= 0;
  }

  bool AllReached(Counter Board::*of_board, uint32_t value) const {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && !Reached(board(r)->*of_board, value)) return false;
    }
    return true;
  }

  void AwaitAll(Counter Board::*of_board, uint32_t value) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) Await(of_board, value, r);
    }
  }

  // Waits until a counter of a peer has reached a value.
  void Await(Counter Board::*of_board, uint32_t value, int peer) {
    Counter& counter = board(peer)->*of_board;
    auto reached = [&] { return Reached(counter, value); };
    for (int i = 0; i < kSpins; ++i) {
      if (reached()) return;
      Pause();
    }
    waits_for_[peer] = true;
    double waited = 0, last = 0;
    while (!reached()) {
      Counter& sleepers = board(peer)->sleepers;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = counter.load(std::memory_order_seq_cst);
      const timespec slice{0, kSliceMs * 1000000L};
      if (static_cast<int32_t>(seen - value) < 0) Futex(&counter, FUTEX_WAIT, seen, &slice);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (reached()) break;
      // A peer may have done its work, and ended well, between the two looks.
      if (IsClosed(peer) && !reached()) ThrowLost(peer);
      CheckWait(&waited, &last);
    }
    waits_for_[peer] = false;
  }

  char* const memory_;
  uint32_t next_round_ = 0;
};

}  // namespace

size_t SharedBytes(int size) { return size_t(size) * (kPage + kSlots * kSlotBytes); }

std::unique_ptr<Communicator> MakeSharedMemoryCommunicator(int rank, int size, const int* sockets,
                                                           int memory, const char* const* names,
                                                           double timeout) {
  void* address = mmap(nullptr, SharedBytes(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       memory, 0);
  if (address == MAP_FAILED) return nullptr;
  return std::make_unique<SharedMemoryCommunicator>(rank, size, sockets, static_cast<char*>(address),
                                                    names, timeout);
}

}  // namespace tfdist
