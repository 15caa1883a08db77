// A list of buffers that is read and written as one.
#ifndef TFDIST_SPANS_H_
#define TFDIST_SPANS_H_

#include <stddef.h>
#include <string.h>
#include <sys/uio.h>

#include <algorithm>
#include <vector>

namespace tfdist {

class Spans {
 public:
  void Add(void* data, size_t bytes) {
    if (bytes == 0) return;
    data_.push_back(static_cast<char*>(data));
    bytes_ += bytes;
    ends_.push_back(bytes_);
  }

  size_t bytes() const { return bytes_; }

  // Returns the address of a byte; `room` gets the bytes from there to the end of its buffer.
  char* At(size_t offset, size_t* room) const {
    const size_t i = std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin();
    *room = ends_[i] - offset;
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return data_[i] + (offset - begin);
  }

  void CopyTo(char* target, size_t offset, size_t bytes) const {
    for (size_t room; bytes > 0; offset += room, target += room, bytes -= room) {
      const char* source = At(offset, &room);
      room = std::min(room, bytes);
      memcpy(target, source, room);
    }
  }

  void CopyFrom(const char* source, size_t offset, size_t bytes) const {
    for (size_t room; bytes > 0; offset += room, source += room, bytes -= room) {
      char* target = At(offset, &room);
      room = std::min(room, bytes);
      memcpy(target, source, room);
    }
  }

  // Adds bytes of another list.
  void AddPart(const Spans& other, size_t offset, size_t bytes) {
    for (size_t room; bytes > 0; offset += room, bytes -= room) {
      char* data = other.At(offset, &room);
      room = std::min(room, bytes);
      Add(data, room);
    }
  }

  // Copies bytes of another list.
  void CopyPart(const Spans& other, size_t from, size_t to, size_t bytes) const {
    for (size_t room; bytes > 0; from += room, to += room, bytes -= room) {
      const char* source = other.At(from, &room);
      room = std::min(room, bytes);
      CopyFrom(source, to, room);
    }
  }

  // Describes up to `bytes` bytes from `offset` on in up to `capacity` vectors; returns how many.
  int Vectors(size_t offset, size_t bytes, iovec* vectors, int capacity) const {
    int count = 0;
    for (size_t room; bytes > 0 && count < capacity; offset += room, bytes -= room) {
      char* data = At(offset, &room);
      room = std::min(room, bytes);
      vectors[count++] = {data, room};
    }
    return count;
  }

 private:
  std::vector<char*> data_;
  std::vector<size_t> ends_;
  size_t bytes_ = 0;
};

}  // namespace tfdist
#endif  // TFDIST_SPANS_H_
