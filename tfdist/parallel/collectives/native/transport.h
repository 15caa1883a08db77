// Collectives between the worker processes of a job, on tensors in the memory of CPUs.
//
// A communicator joins the same number of processes everywhere. Each process calls the same
// collectives in the same order, with the same sizes and dtypes; what differs is an error in all of
// them. Sums are computed in the order of the ranks, each by one process, so that all processes get
// the same bits, whichever way the data travels. 16-bit floats are summed in 32 bits, and rounded
// once. Where processes share memory on several hosts, sums are those of the hosts' sums (hosts.cc).
//
// The library knows neither TensorFlow nor Python. Connections are made, and peers authenticated, by
// the caller (connections.py), which hands over connected sockets.
#ifndef TFDIST_TRANSPORT_H_
#define TFDIST_TRANSPORT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Dtypes, with TensorFlow's numbers.
enum {
  TFDIST_FLOAT32 = 1,
  TFDIST_FLOAT64 = 2,
  TFDIST_INT32 = 3,
  TFDIST_INT64 = 9,
  TFDIST_BFLOAT16 = 14,
  TFDIST_FLOAT16 = 19,
};

enum {
  TFDIST_ALL_REDUCE = 0,      // any number of buffers; each output is as large as its input
  TFDIST_REDUCE_SCATTER = 1,  // input: a row for each process; output: the sum of own rows
  TFDIST_ALL_GATHER = 2,      // input: a row; output: the rows of all processes
  TFDIST_ALL_TO_ALL = 3,      // input: a row for each process; output: a row from each process
};

enum { TFDIST_SUM = 0, TFDIST_MIN = 1, TFDIST_MAX = 2 };

// Returns the version of this interface, which library.py expects.
int tfdist_version(void);

// Returns the bytes of memory that `size` processes of a host share.
size_t tfdist_shared_bytes(int size);

// Makes a communicator and returns its number, or -1 if memory cannot be mapped (see errno).
//
//   sockets: For each rank a connected stream socket, which the communicator owns from now on;
//            -1 for its own rank.
//   hosts:   Number of each rank's host, from 0, or NULL if all have the same one.
//   memory:  File of tfdist_shared_bytes(n) zeros that the n processes of this host share, or -1 to
//            send all data through the sockets. If there are several hosts, each must have n
//            processes. The caller may close it afterwards.
//   names:   Name of each rank, for messages.
//   timeout: Seconds that a call waits without progress; 0 means no bound.
int64_t tfdist_open(int rank, int size, const int* sockets, const int* hosts, int memory,
                    const char* const* names, double timeout);

// Runs a collective, and blocks until it is done. Inputs and outputs may be the same buffers in an
// all-reduce. Returns 0, or -1 with a message in `error`. After an error the communicator is broken:
// its peers are told, and all later calls fail with the same message.
//
//   factor: Factor of this process's floats in a sum. Other than 1, it needs an all-reduce or a
//           reduce-scatter, and memory that all processes share. With 0, NaN counts as 0, too.
//   name: Name of the call, equal in all processes; up to 79 characters are compared.
int tfdist_run(int64_t communicator, int collective, int dtype, int reduction, double factor,
               const char* name, const void* const* inputs, void* const* outputs,
               const size_t* input_bytes, const size_t* output_bytes, int count, char* error,
               size_t error_bytes);

// Ends the current call and all later calls with this message. Any thread may call it.
void tfdist_abort(int64_t communicator, const char* message);

// Writes the ranks for which the current call waits into `ranks`, and returns their number.
int tfdist_waiting_for(int64_t communicator, int* ranks, int capacity);

// Closes the sockets and the memory, after the current call has ended. In a forked child, this closes
// what the child has inherited.
void tfdist_close(int64_t communicator);

#ifdef __cplusplus
}
#endif
#endif  // TFDIST_TRANSPORT_H_
