// Collectives among processes that are connected by stream sockets, each with each.
//
// In a call, a process sends each peer its header, then the input that this peer needs ("scatter"),
// then the result that it has computed itself ("gather"); any of these may be empty. What arrives is
// put where it belongs at once, or reduced as soon as a chunk of all peers is there. So computation
// overlaps with the transfer, and scratch memory is a chunk for each peer.
//
// An all-reduce may write into its input: a part of the result arrives from a peer only after the peer
// has received the input of this part.
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

#include "communicator.h"
#include "reduction.h"
#include "transport.h"

namespace tfdist {
namespace {

constexpr size_t kChunkBytes = 256 << 10;   // reduced at once
constexpr size_t kTransferBytes = 1 << 20;  // passed to the kernel at once
constexpr int kVectors = 16;

// A range of bytes, of which the first `done` ones are done.
struct Range {
  const Spans* spans = nullptr;
  size_t begin = 0;
  size_t bytes = 0;
  size_t done = 0;

  size_t left() const { return bytes - done; }
};

// What travels to and from one member.
struct Lane {
  int member = 0;
  int peer = 0;  // its rank
  size_t header_sent = 0;
  Header header;  // of the peer
  size_t header_received = 0;
  Range send_scatter, send_gather;
  Range receive_scatter, receive_gather;
  std::unique_ptr<char[]> chunk;  // input to be reduced
  size_t in_chunk = 0;
};

class SocketExchange : public Exchange {
 public:
  SocketExchange(Peers* peers, std::vector<int> members) : Exchange(peers, std::move(members)) {
    for (int m = 0; m < size_; ++m) {
      if (m == own_) continue;
      lanes_.emplace_back();
      lanes_.back().member = m;
      lanes_.back().peer = members_[m];
      lanes_.back().chunk.reset(new char[kChunkBytes]);
    }
  }

  void Run(const Call& call) override {
    call_ = &call;
    Plan();
    double waited = 0, last = 0;
    for (;;) {
      bool progress = false, done = true;
      // The headers are sent to all peers before one of them may turn out to be different.
      for (Lane& lane : lanes_) progress |= Send(&lane);
      for (Lane& lane : lanes_) progress |= Receive(&lane);
      progress |= ReduceChunk();
      for (Lane& lane : lanes_) done = done && !WantsToSend(lane) && IsReceived(lane);
      if (done && reduced_ == reduce_bytes_) return;
      if (progress) {
        waited = last = 0;
      } else {
        Wait();
        peers_->CheckWait(&waited, &last);
      }
    }
  }

 private:
  // Fills in what travels to and from each peer, and copies what stays here.
  void Plan() {
    const size_t width = ElementBytes(call_->header.dtype);
    const size_t bytes = call_->input.bytes();
    const size_t row = bytes / size_;
    auto part = [&](int m) { return PartBegin(bytes, width, m, size_); };
    const bool reduces =
        call_->collective == TFDIST_ALL_REDUCE || call_->collective == TFDIST_REDUCE_SCATTER;
    whole_ = call_->collective == TFDIST_ALL_REDUCE && bytes <= kWholeBytes;
    headers_missing_ = size_ - 1;
    reduced_ = reduce_bytes_ = reduce_input_ = reduce_output_ = 0;
    if (whole_) {
      reduce_bytes_ = bytes;
    } else if (call_->collective == TFDIST_ALL_REDUCE) {
      reduce_input_ = reduce_output_ = part(own_);
      reduce_bytes_ = part(own_ + 1) - part(own_);
    } else if (call_->collective == TFDIST_REDUCE_SCATTER) {
      reduce_input_ = row * own_;
      reduce_bytes_ = row;
    } else if (call_->collective == TFDIST_ALL_GATHER) {
      call_->output.CopyPart(call_->input, 0, bytes * own_, bytes);
    } else {
      call_->output.CopyPart(call_->input, row * own_, row * own_, row);
    }
    for (Lane& lane : lanes_) {
      const int m = lane.member;
      lane.header_sent = lane.header_received = lane.in_chunk = 0;
      lane.send_scatter = lane.send_gather = lane.receive_scatter = lane.receive_gather = Range{};
      if (reduces) lane.receive_scatter = {nullptr, 0, reduce_bytes_};
      switch (call_->collective) {
        case TFDIST_ALL_REDUCE:
          if (whole_) {
            lane.send_scatter = {&call_->input, 0, bytes};
          } else {
            lane.send_scatter = {&call_->input, part(m), part(m + 1) - part(m)};
            lane.send_gather = {&call_->output, reduce_output_, reduce_bytes_};
            lane.receive_gather = {&call_->output, part(m), part(m + 1) - part(m)};
          }
          break;
        case TFDIST_REDUCE_SCATTER:
          lane.send_scatter = {&call_->input, row * m, row};
          break;
        case TFDIST_ALL_GATHER:
          lane.send_gather = {&call_->input, 0, bytes};
          lane.receive_gather = {&call_->output, bytes * m, bytes};
          break;
        default:
          lane.send_scatter = {&call_->input, row * m, row};
          lane.receive_scatter = {&call_->output, row * m, row};
      }
    }
  }

  // Returns how many bytes of the own result may be sent.
  size_t Ready(const Lane& lane) const {
    const size_t limit =
        call_->collective == TFDIST_ALL_REDUCE ? reduced_ : lane.send_gather.bytes;
    return limit - lane.send_gather.done;
  }

  bool CanSend(const Lane& lane) const {
    return lane.header_sent < sizeof(Header) || lane.send_scatter.left() > 0 || Ready(lane) > 0;
  }
  bool WantsToSend(const Lane& lane) const {
    return lane.header_sent < sizeof(Header) || lane.send_scatter.left() > 0 ||
           lane.send_gather.left() > 0;
  }
  bool IsReceived(const Lane& lane) const {
    return lane.header_received == sizeof(Header) && lane.receive_scatter.left() == 0 &&
           lane.receive_gather.left() == 0;
  }
  // Returns whether what arrives next from a peer has its turn, and room.
  bool CanReceive(const Lane& lane) const {
    if (lane.header_received < sizeof(Header)) return true;
    // All headers come first: a peer that has seen a different one elsewhere sends no data.
    if (headers_missing_ > 0 || IsReceived(lane)) return false;
    return lane.receive_scatter.spans || lane.receive_scatter.left() == 0 ||
           lane.in_chunk < ChunkBytes();
  }
  size_t ChunkBytes() const { return std::min(kChunkBytes, reduce_bytes_ - reduced_); }

  bool Send(Lane* lane) {
    if (!CanSend(*lane)) return false;
    iovec vectors[kVectors];
    int count = 0;
    const size_t header_left = sizeof(Header) - lane->header_sent;
    if (header_left > 0) {
      const char* header = reinterpret_cast<const char*>(&call_->header);
      vectors[count++] = {const_cast<char*>(header) + lane->header_sent, header_left};
    }
    count += Vectors(lane->send_scatter, lane->send_scatter.left(), vectors + count, count);
    size_t listed = 0;
    for (int i = 0; i < count; ++i) listed += vectors[i].iov_len;
    if (listed == header_left + lane->send_scatter.left()) {
      count += Vectors(lane->send_gather, Ready(*lane), vectors + count, count);
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    const ssize_t sent =
        sendmsg(peers_->socket(lane->peer), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) return false;
      // What peers have sent before says more than the lost connection.
      for (Lane& other : lanes_) {
        while (other.header_received < sizeof(Header) && Receive(&other)) {
        }
      }
      peers_->ThrowLost(lane->peer);
    }
    size_t left = sent;
    left -= Take(&lane->header_sent, header_left, left);
    left -= Take(&lane->send_scatter.done, lane->send_scatter.left(), left);
    lane->send_gather.done += left;
    return sent > 0;
  }

  static size_t Take(size_t* done, size_t left, size_t bytes) {
    const size_t taken = std::min(left, bytes);
    *done += taken;
    return taken;
  }

  static int Vectors(const Range& range, size_t bytes, iovec* vectors, int used) {
    if (bytes == 0) return 0;
    return range.spans->Vectors(range.begin + range.done, std::min(bytes, kTransferBytes), vectors,
                                kVectors - used);
  }

  bool Receive(Lane* lane) {
    if (!CanReceive(*lane)) return false;
    iovec vectors[kVectors];
    int count = 1;
    size_t* done;
    Range& scatter = lane->receive_scatter;
    if (lane->header_received < sizeof(Header)) {
      done = &lane->header_received;
      vectors[0] = {reinterpret_cast<char*>(&lane->header) + *done, sizeof(Header) - *done};
    } else if (scatter.left() > 0 && !scatter.spans) {
      done = &lane->in_chunk;
      vectors[0] = {lane->chunk.get() + *done, ChunkBytes() - *done};
    } else {
      Range& range = scatter.left() > 0 ? scatter : lane->receive_gather;
      done = &range.done;
      count = Vectors(range, range.left(), vectors, 0);
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    const ssize_t received = recvmsg(peers_->socket(lane->peer), &message, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (received <= 0) peers_->ThrowLost(lane->peer);
    *done += received;
    if (done == &lane->in_chunk) scatter.done += received;
    if (done == &lane->header_received && *done == sizeof(Header)) {
      --headers_missing_;
      peers_->Compare(call_->header, lane->header, lane->peer);
    }
    return true;
  }

  // Reduces a chunk if all peers have sent it.
  bool ReduceChunk() {
    const size_t bytes = ChunkBytes();
    if (bytes == 0) return false;
    for (const Lane& lane : lanes_) {
      if (lane.in_chunk < bytes) return false;
      // The output may be the input, of which a member still needs a part.
      if (whole_ && lane.send_scatter.left() > 0) return false;
    }
    std::vector<const void*> sources(size_);
    for (size_t offset = 0; offset < bytes;) {
      size_t room, output_room;
      const char* own = call_->input.At(reduce_input_ + reduced_ + offset, &room);
      char* output = call_->output.At(reduce_output_ + reduced_ + offset, &output_room);
      const size_t n = std::min({room, output_room, bytes - offset});
      sources[own_] = own;
      for (const Lane& lane : lanes_) sources[lane.member] = lane.chunk.get() + offset;
      Reduce(call_->header.dtype, call_->header.reduction, sources.data(), size_, n, output,
             nullptr, -1, 1);
      offset += n;
    }
    reduced_ += bytes;
    for (Lane& lane : lanes_) lane.in_chunk = 0;
    return true;
  }

  // Sleeps until something can be sent or received.
  void Wait() {
    polls_.clear();
    for (const Lane& lane : lanes_) {
      short events = 0;
      if (CanReceive(lane)) events |= POLLIN;
      if (CanSend(lane)) events |= POLLOUT;
      if (events) polls_.push_back({peers_->socket(lane.peer), events, 0});
      peers_->SetWaitsFor(lane.peer, events != 0);
    }
    poll(polls_.data(), polls_.size(), kSliceMs);
  }

  std::vector<Lane> lanes_;
  std::vector<pollfd> polls_;
  const Call* call_ = nullptr;
  bool whole_ = false;  // whether all members reduce all
  int headers_missing_ = 0;
  // The bytes that this process reduces: where they are in the input and output, and how many are
  // done.
  size_t reduce_input_ = 0, reduce_output_ = 0, reduce_bytes_ = 0, reduced_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> MakeSocketExchange(Peers* peers, std::vector<int> members) {
  return std::make_unique<SocketExchange>(peers, std::move(members));
}

}  // namespace tfdist
