#include "transport.h"

#include <stdio.h>
#include <string.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "reduction.h"

namespace {

using tfdist::Call;
using tfdist::Communicator;

// Communicators by number. A call holds its communicator, which may be closed meanwhile.
std::mutex mutex;
std::map<int64_t, std::shared_ptr<Communicator>>& Communicators() {
  static auto* communicators = new std::map<int64_t, std::shared_ptr<Communicator>>;
  return *communicators;
}

std::shared_ptr<Communicator> Find(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = Communicators().find(number);
  return found == Communicators().end() ? nullptr : found->second;
}

// Returns what is wrong with the sizes of a call, or "".
std::string CheckSizes(size_t size, int collective, int dtype, size_t inputs, size_t outputs,
                       int count) {
  const size_t width = tfdist::ElementBytes(dtype);
  if (width == 0) return "expected a dtype that can be sent, received number " + std::to_string(dtype);
  if (collective != TFDIST_ALL_REDUCE && count != 1) return "expected one tensor";
  size_t expected = inputs;
  if (collective == TFDIST_REDUCE_SCATTER) expected = inputs / size;
  if (collective == TFDIST_ALL_GATHER) expected = inputs * size;
  const bool rows = collective == TFDIST_REDUCE_SCATTER || collective == TFDIST_ALL_TO_ALL;
  if (inputs % width || (rows && inputs % (size * width)) || outputs != expected) {
    return "expected a row for each of " + std::to_string(size) + " processes, received " +
           std::to_string(inputs) + " bytes for " + std::to_string(outputs);
  }
  return "";
}

}  // namespace

int tfdist_version(void) { return 3; }

size_t tfdist_shared_bytes(int size) { return tfdist::SharedBytes(size); }

int64_t tfdist_open(int rank, int size, const int* sockets, const int* hosts, int memory,
                    const char* const* names, double timeout) {
  auto peers = std::make_unique<tfdist::Peers>(rank, size, sockets, names, timeout);
  std::vector<int> all(size);
  std::vector<std::vector<int>> by_host;
  for (int r = 0; r < size; ++r) {
    all[r] = r;
    const size_t host = hosts ? hosts[r] : 0;
    if (host >= by_host.size()) by_host.resize(host + 1);
    by_host[host].push_back(r);
  }
  std::unique_ptr<tfdist::Exchange> exchange;
  if (memory < 0) {
    exchange = tfdist::MakeSocketExchange(peers.get(), all);
  } else if (by_host.size() == 1) {
    exchange = tfdist::MakeSharedMemoryExchange(peers.get(), all, memory);
  } else {
    exchange = tfdist::MakeHostsExchange(peers.get(), by_host, memory);
  }
  if (!exchange) return -1;
  auto communicator = std::make_shared<Communicator>(std::move(peers), std::move(exchange));
  static int64_t next = 1;
  std::lock_guard<std::mutex> lock(mutex);
  Communicators()[next] = communicator;
  return next++;
}

int tfdist_run(int64_t number, int collective, int dtype, int reduction, double factor,
               const char* name, const void* const* inputs, void* const* outputs,
               const size_t* input_bytes, const size_t* output_bytes, int count, char* error,
               size_t error_bytes) {
  auto fail = [&](const std::string& message) {
    snprintf(error, error_bytes, "%s", message.c_str());
    return -1;
  };
  std::shared_ptr<Communicator> communicator = Find(number);
  if (!communicator) return fail("the communicator is closed");
  Call call;
  for (int i = 0; i < count; ++i) {
    call.input.Add(const_cast<void*>(inputs[i]), input_bytes[i]);  // never written to
    call.output.Add(outputs[i], output_bytes[i]);
  }
  const std::string problem = CheckSizes(communicator->peers()->size(), collective, dtype,
                                         call.input.bytes(), call.output.bytes(), count);
  if (!problem.empty()) return fail(problem);
  const bool sums = (collective == TFDIST_ALL_REDUCE || collective == TFDIST_REDUCE_SCATTER) &&
                    reduction == TFDIST_SUM;
  const bool integers = dtype == TFDIST_INT32 || dtype == TFDIST_INT64;
  if (factor != 1 && (!sums || integers || !communicator->CanScale())) {
    return fail("expected a sum of floats in shared memory for a factor");
  }
  memset(&call.header, 0, sizeof call.header);  // headers are compared byte by byte
  call.header.bytes = call.input.bytes();
  call.header.collective = call.collective = collective;
  call.factor = factor;
  call.header.dtype = dtype;
  call.header.reduction = reduction;
  call.header.buffers = count;
  strncpy(call.header.name, name, sizeof call.header.name - 1);
  std::string message;
  return communicator->Run(&call, &message) ? 0 : fail(message);
}

void tfdist_abort(int64_t number, const char* message) {
  if (auto communicator = Find(number)) communicator->peers()->Abort(message);
}

int tfdist_waiting_for(int64_t number, int* ranks, int capacity) {
  auto communicator = Find(number);
  if (!communicator) return 0;
  int count = 0;
  for (int rank : communicator->peers()->WaitingFor()) {
    if (count < capacity) ranks[count++] = rank;
  }
  return count;
}

void tfdist_close(int64_t number) {
  std::shared_ptr<Communicator> communicator;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = Communicators().find(number);
  if (found == Communicators().end()) return;
  communicator = found->second;
  Communicators().erase(found);
}
