#include "reduction.h"

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#include "transport.h"

namespace tfdist {
namespace {

// Elements that are reduced at once; their sums stay in the first-level cache.
constexpr size_t kBlock = 1024;

template <typename To, typename From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// How a dtype is stored and computed with.
template <typename T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static inline T Load(T x) { return x; }
  static inline T Store(T x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Computed = float;
  static inline float Load(uint16_t x) { return BitCast<float>(uint32_t{x} << 16); }
  static inline uint16_t Store(float x) {
    const uint32_t bits = BitCast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(nan ? 0x7fc0 : rounded);
  }
};

// IEEE half precision. Written with integers and without branches, so that compilers use vectors
// also where the processor has no such conversions.
struct Float16 {
  using Stored = uint16_t;
  using Computed = float;
  static inline float Load(uint16_t x) {
    const uint32_t magnitude = uint32_t{x & 0x7fffu} << 13;
    // Multiplying by 2^112 moves the exponent from bias 15 to 127, and normalizes subnormals.
    const float scaled = BitCast<float>(magnitude) * BitCast<float>(uint32_t{239} << 23);
    const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0;  // infinity and NaN
    return BitCast<float>(BitCast<uint32_t>(scaled) | special | (uint32_t{x & 0x8000u} << 16));
  }
  static inline uint16_t Store(float x) {
    const uint32_t bits = BitCast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    // Below 2^-14: adding 0.5 shifts the bits of a subnormal into place, and rounds them.
    const uint32_t small = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000;
    // Else: change the bias from 127 to 15, and round to nearest, ties to even.
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t result = magnitude < 0x38800000 ? small : normal;
    result = magnitude >= 0x47800000 ? 0x7c00 : result;  // 65536 and above
    result = magnitude > 0x7f800000 ? 0x7e00 : result;
    return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000));
  }
};

struct Sum {
  template <typename T>
  static inline T Combine(T a, T b) {
    return a + b;
  }
};
// Two's complement wraps around, as it does in TensorFlow; signed overflow is undefined in C++.
template <>
inline int32_t Sum::Combine(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
template <>
inline int64_t Sum::Combine(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
// A NaN makes the result NaN, whichever process has it.
struct Min {
  template <typename T>
  static inline T Combine(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <typename T>
  static inline T Combine(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

// Combines two sources that need no conversion. The output may be one of the sources.
template <typename T, typename Combine>
void CombineTwo(const T* first, const T* second, size_t elements, T* output, T* copy,
                Combine combine) {
  if (copy) {
#pragma GCC ivdep
    for (size_t i = 0; i < elements; ++i) output[i] = copy[i] = combine(first[i], second[i]);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < elements; ++i) output[i] = combine(first[i], second[i]);
  }
}

template <typename Dtype, typename Operation>
void ReduceTyped(const void* const* sources, int count, size_t bytes, void* output, void* copy,
                 int scaled, double factor) {
  using Stored = typename Dtype::Stored;
  using Computed = typename Dtype::Computed;
  const size_t elements = bytes / sizeof(Stored);
  // A product by 1 is exact.
  auto factor_of = [&](int source) { return static_cast<Computed>(source == scaled ? factor : 1); };
  if constexpr (std::is_same_v<Stored, Computed>) {
    if (count == 2) {
      const auto* first = static_cast<const Stored*>(sources[0]);
      const auto* second = static_cast<const Stored*>(sources[1]);
      auto* results = static_cast<Stored*>(output);
      auto* copies = static_cast<Stored*>(copy);
      if (scaled < 0) {
        return CombineTwo(first, second, elements, results, copies,
                          [](Stored a, Stored b) { return Operation::Combine(a, b); });
      }
      const Stored f = factor_of(0), g = factor_of(1);
      return CombineTwo(first, second, elements, results, copies,
                        [f, g](Stored a, Stored b) { return Operation::Combine(a * f, b * g); });
    }
  }
  Computed block[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t n = std::min(kBlock, elements - begin);
    const Stored* first = static_cast<const Stored*>(sources[0]) + begin;
    const Stored* second = static_cast<const Stored*>(sources[1]) + begin;
    const Computed f = factor_of(0), g = factor_of(1);
    for (size_t i = 0; i < n; ++i) {
      block[i] = Operation::Combine(Dtype::Load(first[i]) * f, Dtype::Load(second[i]) * g);
    }
    for (int r = 2; r < count; ++r) {
      const Stored* source = static_cast<const Stored*>(sources[r]) + begin;
      const Computed h = factor_of(r);
      for (size_t i = 0; i < n; ++i) {
        block[i] = Operation::Combine(block[i], Dtype::Load(source[i]) * h);
      }
    }
    Stored* result = static_cast<Stored*>(output) + begin;
    for (size_t i = 0; i < n; ++i) result[i] = Dtype::Store(block[i]);
    if (copy) memcpy(static_cast<Stored*>(copy) + begin, result, n * sizeof(Stored));
  }
}

template <typename Dtype>
void ReduceBy(int reduction, const void* const* sources, int count, size_t bytes, void* output,
              void* copy, int scaled, double factor) {
  switch (reduction) {
    case TFDIST_MIN:
      return ReduceTyped<Dtype, Min>(sources, count, bytes, output, copy, scaled, factor);
    case TFDIST_MAX:
      return ReduceTyped<Dtype, Max>(sources, count, bytes, output, copy, scaled, factor);
    default:
      return ReduceTyped<Dtype, Sum>(sources, count, bytes, output, copy, scaled, factor);
  }
}

template <typename Dtype>
void ScaleTyped(double factor, const void* source, size_t bytes, void* target) {
  using Stored = typename Dtype::Stored;
  const auto* from = static_cast<const Stored*>(source);
  auto* to = static_cast<Stored*>(target);
  const auto f = static_cast<typename Dtype::Computed>(factor);
#pragma GCC ivdep
  for (size_t i = 0; i < bytes / sizeof(Stored); ++i) to[i] = Dtype::Store(Dtype::Load(from[i]) * f);
}

}  // namespace

size_t ElementBytes(int dtype) {
  switch (dtype) {
    case TFDIST_FLOAT64:
    case TFDIST_INT64:
      return 8;
    case TFDIST_FLOAT32:
    case TFDIST_INT32:
      return 4;
    case TFDIST_BFLOAT16:
    case TFDIST_FLOAT16:
      return 2;
    default:
      return 0;
  }
}

const char* DtypeName(int dtype) {
  switch (dtype) {
    case TFDIST_FLOAT64:
      return "float64";
    case TFDIST_INT64:
      return "int64";
    case TFDIST_FLOAT32:
      return "float32";
    case TFDIST_INT32:
      return "int32";
    case TFDIST_BFLOAT16:
      return "bfloat16";
    case TFDIST_FLOAT16:
      return "float16";
    default:
      return "an unknown dtype";
  }
}

void Reduce(int dtype, int reduction, const void* const* sources, int count, size_t bytes,
            void* output, void* copy, int scaled, double factor) {
  switch (dtype) {
    case TFDIST_FLOAT64:
      return ReduceBy<Plain<double>>(reduction, sources, count, bytes, output, copy, scaled, factor);
    case TFDIST_INT64:
      return ReduceBy<Plain<int64_t>>(reduction, sources, count, bytes, output, copy, scaled, factor);
    case TFDIST_INT32:
      return ReduceBy<Plain<int32_t>>(reduction, sources, count, bytes, output, copy, scaled, factor);
    case TFDIST_BFLOAT16:
      return ReduceBy<BFloat16>(reduction, sources, count, bytes, output, copy, scaled, factor);
    case TFDIST_FLOAT16:
      return ReduceBy<Float16>(reduction, sources, count, bytes, output, copy, scaled, factor);
    default:
      return ReduceBy<Plain<float>>(reduction, sources, count, bytes, output, copy, scaled, factor);
  }
}

void Scale(int dtype, double factor, const void* source, size_t bytes, void* target) {
  switch (dtype) {
    case TFDIST_FLOAT64:
      return ScaleTyped<Plain<double>>(factor, source, bytes, target);
    case TFDIST_BFLOAT16:
      return ScaleTyped<BFloat16>(factor, source, bytes, target);
    case TFDIST_FLOAT16:
      return ScaleTyped<Float16>(factor, source, bytes, target);
    default:
      return ScaleTyped<Plain<float>>(factor, source, bytes, target);
  }
}

}  // namespace tfdist
