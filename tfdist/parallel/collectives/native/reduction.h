// Elementwise sums, minima and maxima of several buffers.
#ifndef TFDIST_REDUCTION_H_
#define TFDIST_REDUCTION_H_

#include <stddef.h>

namespace tfdist {

// Returns the bytes of an element, or 0 for an unknown dtype.
size_t ElementBytes(int dtype);

const char* DtypeName(int dtype);

// Reduces `count` buffers in their order, element by element. `output` may be one of the sources.
// `copy` gets the result too, unless it is null; it overlaps with nothing else. The elements of the
// source number `scaled`, if it is not -1, are multiplied by `factor`.
void Reduce(int dtype, int reduction, const void* const* sources, int count, size_t bytes,
            void* output, void* copy, int scaled, double factor);

// Copies floats times a factor.
void Scale(int dtype, double factor, const void* source, size_t bytes, void* target);

}  // namespace tfdist
#endif  // TFDIST_REDUCTION_H_
