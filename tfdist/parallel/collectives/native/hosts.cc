// Collectives of processes on several hosts, each of which has equally many of them.
//
// Think of a grid with a row for each host. The processes of a row share memory, those of a column
// are connected by sockets. A collective runs in the rows and in the columns, so that what a host
// sends to another is what one process would send: if all pairs exchanged their data, it would be as
// many times more as there are processes on a host. The order of the sums is the same everywhere.
// 16-bit floats are rounded once on each host, and once more in the sum over the hosts.
//
// Processes of a host that are out of step meet before they wait for other hosts.
#include "communicator.h"
#include "reduction.h"
#include "transport.h"

namespace tfdist {
namespace {

class HostsExchange : public Exchange {
 public:
  HostsExchange(Peers* peers, std::vector<std::vector<int>> hosts, std::vector<int> members,
                std::unique_ptr<Exchange> row, std::unique_ptr<Exchange> column)
      : Exchange(peers, std::move(members)),
        hosts_(std::move(hosts)),
        row_(std::move(row)),
        column_(std::move(column)) {}

  void Run(const Call& call) override {
    const size_t bytes = call.input.bytes();
    switch (call.collective) {
      case TFDIST_ALL_REDUCE: {
        if (bytes <= kWholeBytes) {
          InRow(call, TFDIST_ALL_REDUCE, call.input, call.output);
          InColumn(call, TFDIST_ALL_REDUCE, call.output, call.output);
          return;
        }
        // Each process of a host sums a part; parts are equal with a few more bytes at the end.
        const size_t part = (bytes / ElementBytes(call.header.dtype) + columns() - 1) / columns() *
                            ElementBytes(call.header.dtype);
        const Spans sum = Scratch(part);
        InRow(call, TFDIST_REDUCE_SCATTER, Padded(call.input, part * columns()), sum);
        InColumn(call, TFDIST_ALL_REDUCE, sum, sum);
        InRow(call, TFDIST_ALL_GATHER, sum, Padded(call.output, part * columns()));
        return;
      }
      case TFDIST_REDUCE_SCATTER: {
        const Spans sums = Scratch(bytes / columns());
        InRow(call, TFDIST_REDUCE_SCATTER, ByColumns(call.input), sums);
        InColumn(call, TFDIST_REDUCE_SCATTER, sums, call.output);
        return;
      }
      case TFDIST_ALL_GATHER: {
        InRow(call, TFDIST_ALL_REDUCE, Spans(), Spans());  // to meet
        const Spans column = Scratch(bytes * hosts_.size());
        InColumn(call, TFDIST_ALL_GATHER, call.input, column);
        InRow(call, TFDIST_ALL_GATHER, column, ByColumns(call.output));
        return;
      }
      default: {
        // From each process of this host, in their order: what it has for this column of each host.
        const Spans from_row = Scratch(bytes);
        InRow(call, TFDIST_ALL_TO_ALL, ByColumns(call.input), from_row);
        Spans to_hosts;
        const size_t one = bytes / size_;
        for (size_t host = 0; host < hosts_.size(); ++host) {
          for (size_t column = 0; column < columns(); ++column) {
            to_hosts.AddPart(from_row, (column * hosts_.size() + host) * one, one);
          }
        }
        Spans by_hosts;
        for (const std::vector<int>& host : hosts_) {
          for (int rank : host) by_hosts.AddPart(call.output, rank * one, one);
        }
        InColumn(call, TFDIST_ALL_TO_ALL, to_hosts, by_hosts);
      }
    }
  }

 private:
  size_t columns() const { return hosts_[0].size(); }

  void InRow(const Call& call, int collective, const Spans& input, const Spans& output) {
    row_->Run(Call{call.header, collective, input, output});
    peers_->ClearWaits();
  }

  void InColumn(const Call& call, int collective, const Spans& input, const Spans& output) {
    column_->Run(Call{call.header, collective, input, output});
    peers_->ClearWaits();
  }

  // Returns parts by rank in the order of the columns, and of the hosts within each.
  Spans ByColumns(const Spans& by_rank) const {
    Spans parts;
    const size_t one = by_rank.bytes() / size_;
    for (size_t column = 0; column < columns(); ++column) {
      for (const std::vector<int>& host : hosts_) parts.AddPart(by_rank, host[column] * one, one);
    }
    return parts;
  }

  Spans Padded(Spans spans, size_t bytes) {
    padding_.resize(bytes - spans.bytes());
    spans.Add(padding_.data(), padding_.size());
    return spans;
  }

  // Returns memory between the phases of a call, which the next call uses again.
  Spans Scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    Spans spans;
    spans.Add(scratch_.data(), bytes);
    return spans;
  }

  const std::vector<std::vector<int>> hosts_;  // ranks
  const std::unique_ptr<Exchange> row_;
  const std::unique_ptr<Exchange> column_;
  std::vector<char> scratch_;
  std::vector<char> padding_;
};

}  // namespace

std::unique_ptr<Exchange> MakeHostsExchange(Peers* peers, std::vector<std::vector<int>> hosts,
                                            int memory) {
  std::vector<int> members, row, column;
  for (const std::vector<int>& host : hosts) {
    for (size_t i = 0; i < host.size(); ++i) {
      members.push_back(host[i]);
      if (host[i] != peers->rank()) continue;
      row = host;
      for (const std::vector<int>& other : hosts) column.push_back(other[i]);
    }
  }
  auto in_row = MakeSharedMemoryExchange(peers, std::move(row), memory);
  if (!in_row) return nullptr;
  return std::make_unique<HostsExchange>(peers, std::move(hosts), std::move(members),
                                         std::move(in_row),
                                         MakeSocketExchange(peers, std::move(column)));
}

}  // namespace tfdist
