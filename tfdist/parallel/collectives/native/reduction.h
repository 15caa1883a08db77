// Elementwise sums, minima and maxima of several buffers.
#ifndef TFDIST_REDUCTION_H_
#define TFDIST_REDUCTION_H_

#include <stddef.h>

namespace tfdist {

// Returns the bytes of an element, or 0 for an unknown dtype.
size_t ElementBytes(int dtype);

const char* DtypeName(int dtype);

// Reduces `count` buffers in their order, element by element. `output` may be one of the sources.
// `copy` gets the result too, unless it is null; it overlaps with nothing else.
void Reduce(int dtype, int reduction, const void* const* sources, int count, size_t bytes,
            void* output, void* copy);

}  // namespace tfdist
#endif  // TFDIST_REDUCTION_H_
