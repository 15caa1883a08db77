#include "transport.h"

#include <stdio.h>
#include <string.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

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
std::string CheckSizes(const Communicator& communicator, int collective, int dtype, size_t inputs,
                       size_t outputs, int count) {
  const size_t width = tfdist::ElementBytes(dtype);
  const size_t size = communicator.size();
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

int tfdist_version(void) { return 1; }

size_t tfdist_shared_bytes(int size) { return tfdist::SharedBytes(size); }

int64_t tfdist_open(int rank, int size, const int* sockets, int memory, const char* const* names,
                    double timeout) {
  std::shared_ptr<Communicator> communicator =
      memory < 0 ? tfdist::MakeSocketCommunicator(rank, size, sockets, names, timeout)
                 : tfdist::MakeSharedMemoryCommunicator(rank, size, sockets, memory, names, timeout);
  if (!communicator) return -1;
  static int64_t next = 1;
  std::lock_guard<std::mutex> lock(mutex);
  Communicators()[next] = communicator;
  return next++;
}

int tfdist_run(int64_t number, int collective, int dtype, int reduction, const char* name,
               const void* const* inputs, void* const* outputs, const size_t* input_bytes,
               const size_t* output_bytes, int count, char* error, size_t error_bytes) {
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
  const std::string problem = CheckSizes(*communicator, collective, dtype, call.input.bytes(),
                                         call.output.bytes(), count);
  if (!problem.empty()) return fail(problem);
  memset(&call.header, 0, sizeof call.header);  // headers are compared byte by byte
  call.header.bytes = call.input.bytes();
  call.header.collective = collective;
  call.header.dtype = dtype;
  call.header.reduction = reduction;
  call.header.buffers = count;
  strncpy(call.header.name, name, sizeof call.header.name - 1);
  std::string message;
  return communicator->Run(&call, &message) ? 0 : fail(message);
}

void tfdist_abort(int64_t number, const char* message) {
  if (auto communicator = Find(number)) communicator->Abort(message);
}

int tfdist_waiting_for(int64_t number, int* ranks, int capacity) {
  auto communicator = Find(number);
  if (!communicator) return 0;
  int count = 0;
  for (int rank : communicator->WaitingFor()) {
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
