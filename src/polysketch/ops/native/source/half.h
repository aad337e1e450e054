// Numbers of half precision: read and written here, never computed with.
#pragma once

#include "vector.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

template <class Half>
static inline Unsigned load_bits(const Half* from) {
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Unsigned);
}

template <class Half>
static inline void store_bits(Half* to, Unsigned bits) {
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(bits, Halves);
}

static inline Vector load(const Bfloat16* from) { return (Vector)(load_bits(from) << 16); }

// To nearest, ties to even; what is no number stays none.
static inline void store(Bfloat16* to, Vector x) {
  const Unsigned bits = (Unsigned)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_bits(to, x == x ? rounded : bits >> 16 | 0x40);
}

static inline Vector load(const Float16* from) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(*reinterpret_cast<const __m256i_u*>(from));
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(*reinterpret_cast<const __m128i_u*>(from));
#else
  const Unsigned bits = load_bits(from), sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  // Below 2^-14 numbers have no leading one: as a number between 2^-14 and 2^-13 they have one, which is taken off.
  const Unsigned least = Unsigned{} + (113u << 23);
  const Vector small = (Vector)(rest + least) - (Vector)least;
  const Unsigned normal = rest + (112u << 23), large = rest | 0x7f800000;  // infinite, or no number
  const Unsigned size = rest < (1u << 23) ? (Unsigned)small : rest >= (31u << 23) ? large : normal;
  return (Vector)(size | sign);
#endif
}

// To nearest, ties to even; infinite from 65,520 on.
static inline void store(Float16* to, Vector x) {
#if defined(__AVX512F__)
  *reinterpret_cast<__m256i_u*>(to) = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  *reinterpret_cast<__m128i_u*>(to) = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Unsigned bits = (Unsigned)x, sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  // Added to a half, a number below 2^-14 is rounded by the addition itself.
  const Unsigned half = Unsigned{} + (126u << 23), small = (Unsigned)((Vector)size + (Vector)half) - half;
  const Unsigned normal = (size + (0u - (112u << 23)) + 0xfff + (size >> 13 & 1)) >> 13;
  const Unsigned infinite = Unsigned{} + 0x7c00, none = Unsigned{} + 0x7e00;
  const Unsigned large = size > 0x7f800000 ? none : infinite;
  store_bits(to, (size < (113u << 23) ? small : size >= (143u << 23) ? large : normal) | sign);
#endif
}

// Numbers behind the last whole vector, by way of one: `count` of them, fewer than a vector has.
template <class From, class To>
static inline void convert_rest(const From* from, To* to, int64_t count) {
  From before[kLanes] = {};
  To after[kLanes];
  std::memcpy(before, from, count * sizeof(From));
  store(after, load(before));
  std::memcpy(to, after, count * sizeof(To));
}

template <class From, class To>
static inline void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) convert_rest(from + i, to + i, count - i);
}
