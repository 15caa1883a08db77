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
constexpr int kSpins = 2000;  // looks at a counter, some 50 us, before the process sleeps
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

class SharedMemoryExchange : public Exchange {
 public:
  SharedMemoryExchange(Peers* peers, std::vector<int> members, char* memory)
      : Exchange(peers, std::move(members)), memory_(memory) {}

  bool CanScale() const override { return true; }

  ~SharedMemoryExchange() override { munmap(memory_, SharedBytes(size_)); }

  void Run(const Call& call) override {
    const bool rows =
        call.collective == TFDIST_REDUCE_SCATTER || call.collective == TFDIST_ALL_TO_ALL;
    // Bytes that travel to each process, and how many of them in a round.
    const size_t total = rows ? call.input.bytes() / size_ : call.input.bytes();
    const size_t per_round = rows ? kSlotBytes / size_ / 64 * 64 : kSlotBytes;
    const uint32_t rounds = static_cast<uint32_t>((total + per_round - 1) / per_round);
    const uint32_t first = next_round_;
    const uint32_t last = first + std::max<uint32_t>(1, rounds);  // also without data, they meet
    const int slot_of_header = ++calls_ % 2;
    board(own_)->headers[slot_of_header] = call.header;

    const bool publishes = call.collective == TFDIST_ALL_REDUCE && !IsWhole(call);
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
        for (int m = 0; m < size_ && read == first; ++m) {
          if (m == own_) continue;
          peers_->Compare(call.header, board(m)->headers[slot_of_header], members_[m]);
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
  Board* board(int member) const { return reinterpret_cast<Board*>(memory_ + kPage * member); }

  char* slot(int member, uint32_t round) const {
    return memory_ + kPage * size_ + (size_t(member) * kSlots + round % kSlots) * kSlotBytes;
  }

  static bool IsWhole(const Call& call) { return call.input.bytes() <= kWholeBytes; }

  // Writes a round's input into the own slot.
  void Post(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    char* own = slot(own_, round);
    const size_t width = ElementBytes(call.header.dtype);
    switch (call.collective) {
      case TFDIST_ALL_REDUCE:
        if (IsWhole(call)) {
          PostScaled(call, own, offset, bytes);
        } else {  // all but the part that this process reduces
          const size_t begin = PartBegin(bytes, width, own_, size_);
          const size_t end = PartBegin(bytes, width, own_ + 1, size_);
          PostScaled(call, own, offset, begin);
          PostScaled(call, own + end, offset + end, bytes - end);
        }
        break;
      case TFDIST_ALL_GATHER:
        call.input.CopyTo(own, offset, bytes);
        break;
      default:  // a part of each row, one after the other
        for (int m = 0; m < size_; ++m) {
          if (m == own_) continue;
          PostScaled(call, own + m * bytes, call.input.bytes() / size_ * m + offset, bytes);
        }
    }
  }

  // Copies bytes of the input times the call's factor.
  static void PostScaled(const Call& call, char* target, size_t offset, size_t bytes) {
    if (call.factor == 1) return call.input.CopyTo(target, offset, bytes);
    for (size_t room; bytes > 0; offset += room, target += room, bytes -= room) {
      const char* source = call.input.At(offset, &room);
      room = std::min(room, bytes);
      if (call.factor == 0) {
        memset(target, 0, room);
      } else {
        Scale(call.header.dtype, call.factor, source, room, target);
      }
    }
  }

  // Makes a round's output from the slots of all processes; of a large all-reduce, the own part.
  void Read(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    const size_t width = ElementBytes(call.header.dtype);
    switch (call.collective) {
      case TFDIST_ALL_REDUCE:
        if (IsWhole(call)) {
          ReduceSlots(call, round, 0, offset, offset, bytes, nullptr);
        } else {
          const size_t begin = PartBegin(bytes, width, own_, size_);
          const size_t end = PartBegin(bytes, width, own_ + 1, size_);
          ReduceSlots(call, round, begin, offset + begin, offset + begin, end - begin,
                      slot(own_, round) + begin);
        }
        break;
      case TFDIST_REDUCE_SCATTER:
        ReduceSlots(call, round, own_ * bytes, call.input.bytes() / size_ * own_ + offset, offset, bytes,
                    nullptr);
        break;
      case TFDIST_ALL_GATHER:
        for (int m = 0; m < size_; ++m) {
          call.output.CopyFrom(slot(m, round), call.input.bytes() * m + offset, bytes);
        }
        break;
      default: {
        const size_t row = call.input.bytes() / size_;
        for (int m = 0; m < size_; ++m) {
          if (m != own_) {
            call.output.CopyFrom(slot(m, round) + own_ * bytes, row * m + offset, bytes);
          } else {
            call.output.CopyPart(call.input, row * m + offset, row * m + offset, bytes);
          }
        }
      }
    }
  }

  // Copies the other processes' parts of a large all-reduce.
  void Gather(const Call& call, uint32_t round, size_t offset, size_t bytes) {
    const size_t width = ElementBytes(call.header.dtype);
    for (int i = 1; i < size_; ++i) {
      const int m = (own_ + i) % size_;
      const size_t begin = PartBegin(bytes, width, m, size_);
      const size_t end = PartBegin(bytes, width, m + 1, size_);
      call.output.CopyFrom(slot(m, round) + begin, offset + begin, end - begin);
    }
  }

  // Reduces the own input and bytes of the others' slots, in the order of the members. Where all
  // processes reduce the same bytes, they take what all have posted, which may have been rounded.
  void ReduceSlots(const Call& call, uint32_t round, size_t in_slot, size_t in_input,
                   size_t in_output, size_t bytes, char* copy) {
    alignas(64) static const char zeros[kSlotBytes] = {};
    const bool posted = call.collective == TFDIST_ALL_REDUCE && IsWhole(call);
    const int scaled = call.factor == 1 || call.factor == 0 || posted ? -1 : own_;
    std::vector<const void*> sources(size_);
    while (bytes > 0) {
      size_t room, output_room;
      const char* own = call.input.At(in_input, &room);
      char* output = call.output.At(in_output, &output_room);
      const size_t n = std::min({room, output_room, bytes});
      if (posted) own = slot(own_, round) + in_slot;
      if (!posted && call.factor == 0) own = zeros;
      for (int m = 0; m < size_; ++m) sources[m] = m == own_ ? own : slot(m, round) + in_slot;
      Reduce(call.header.dtype, call.header.reduction, sources.data(), size_, n, output, copy,
             scaled, call.factor);
      in_slot += n;
      in_input += n;
      in_output += n;
      if (copy) copy += n;
      bytes -= n;
    }
  }

  // Sets an own counter, and wakes the processes that sleep for it.
  void Advance(Counter Board::*counter, uint32_t value) {
    (board(own_)->*counter).store(value, std::memory_order_seq_cst);
    if (board(own_)->sleepers.load(std::memory_order_seq_cst) > 0) {
      Futex(&(board(own_)->*counter), FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  static bool Reached(const Counter& counter, uint32_t value) {  // counters wrap around
    return static_cast<int32_t>(counter.load(std::memory_order_acquire) - value) >= 0;
  }

  bool AllReached(Counter Board::*of_board, uint32_t value) const {
    for (int m = 0; m < size_; ++m) {
      if (m != own_ && !Reached(board(m)->*of_board, value)) return false;
    }
    return true;
  }

  void AwaitAll(Counter Board::*of_board, uint32_t value) {
    for (int m = 0; m < size_; ++m) {
      if (m != own_) Await(of_board, value, m);
    }
  }

  // Waits until a counter of a member has reached a value.
  void Await(Counter Board::*of_board, uint32_t value, int member) {
    const int peer = members_[member];
    Counter& counter = board(member)->*of_board;
    auto reached = [&] { return Reached(counter, value); };
    for (int i = 0; i < kSpins; ++i) {
      if (reached()) return;
      Pause();
    }
    peers_->SetWaitsFor(peer, true);
    double waited = 0, last = 0;
    while (!reached()) {
      Counter& sleepers = board(member)->sleepers;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = counter.load(std::memory_order_seq_cst);
      const timespec slice{0, kSliceMs * 1000000L};
      if (static_cast<int32_t>(seen - value) < 0) Futex(&counter, FUTEX_WAIT, seen, &slice);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (reached()) break;
      // A peer may have done its work, and ended well, between the two looks.
      if (peers_->IsClosed(peer) && !reached()) peers_->ThrowLost(peer);
      peers_->CheckWait(&waited, &last);
    }
    peers_->SetWaitsFor(peer, false);
  }

  char* const memory_;
  uint32_t next_round_ = 0;
  uint32_t calls_ = 0;
};

}  // namespace

size_t SharedBytes(int size) { return size_t(size) * (kPage + kSlots * kSlotBytes); }

std::unique_ptr<Exchange> MakeSharedMemoryExchange(Peers* peers, std::vector<int> members,
                                                   int memory) {
  const size_t bytes = SharedBytes(static_cast<int>(members.size()));
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory, 0);
  if (address == MAP_FAILED) return nullptr;
  return std::make_unique<SharedMemoryExchange>(peers, std::move(members),
                                                static_cast<char*>(address));
}

}  // namespace tfdist
