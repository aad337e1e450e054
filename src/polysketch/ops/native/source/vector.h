// Vectors of the compiler's own kind (GCC and Clang), as wide as the machine's; loads and stores need no alignment.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

// Rows of a tile of sums in registers, and of the tallest: more rows are fewer loads for a product, fewer fit triangles.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 8, kTallRows = 8;  // 32 registers: 8 x 2 sums
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 4, kTallRows = 6;  // 16 registers: 6 x 2 sums
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 8, kTallRows = 8;
#else
constexpr int kLanes = 4, kTileRows = 4, kTallRows = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

static inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
static inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }
static inline Vector splat(float x) { return x - Vector{}; }

// 1 / x, to the last place or the one before; x neither zero nor infinite.
static inline Vector reciprocal(Vector x) {
#if defined(__AVX512F__)
  const Vector guess = (Vector)_mm512_rcp14_ps((__m512)x);  // a division takes as long as ten products
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

// 1 / mass; zero for a row without weight, as polysketch/ops/mass.py has it.
static inline float reciprocal_mass(float mass) { return std::fabs(mass) < FLT_MIN ? 0.0f : 1.0f / mass; }

// The lanes of a and b in turn: those of the first halves, those of the second halves.
static inline Vector interleave_first(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

static inline Vector interleave_second(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// The rows of a square of numbers become its columns: rows i and i + half are interleaved, log2(kLanes) times.
template <int kTimes = kLanes>
static inline void transpose(Vector (&rows)[kLanes]) {
  if constexpr (kTimes > 1) {
    Vector mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; i++) {
      mixed[2 * i] = interleave_first(rows[i], rows[i + kLanes / 2]);
      mixed[2 * i + 1] = interleave_second(rows[i], rows[i + kLanes / 2]);
    }
    transpose<kTimes / 2>(mixed);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) rows[i] = mixed[i];
  }
}

// Lane i is the sum of the lanes of row i: those of two rows, interleaved, are added up by halves.
template <int kRows>
static inline Vector sums_of_rows(const Vector (&rows)[kRows]) {
  if constexpr (kRows == 1) {
    return rows[0];
  } else {
    Vector halves[kRows / 2];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; i++)
      halves[i] = interleave_first(rows[i], rows[i + kRows / 2]) + interleave_second(rows[i], rows[i + kRows / 2]);
    return sums_of_rows(halves);
  }
}

static inline Integers lane_numbers() {
  Integers numbers;
  for (int lane = 0; lane < kLanes; lane++) numbers[lane] = lane;
  return numbers;
}

static inline float sum_of(Vector x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);  // by halves: lane by lane, each addition would wait for the one before
#elif defined(__AVX__)
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  return x[0] + x[1];
#else
  float total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += x[lane];
  return total;
#endif
}

// Sum of a[i] b[i], any count.
static inline float dot(const float* a, const float* b, int64_t count) {
  Vector total{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) total += load(a + i) * load(b + i);
  float sum = sum_of(total);
  for (; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// to[i] += by * from[i].
static inline void add_scaled(float by, const float* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] += by * from[i];
}

// a b - rounded, exactly, where `rounded` is a b.
static inline float product_error(float a, float b, float rounded) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, -rounded);
#else
  return static_cast<float>(static_cast<double>(a) * b - rounded);
#endif
}

// x where the mask is set (all bits), else 0: also where x is not finite.
static inline Vector keep(Vector x, Integers mask) { return (Vector)((Integers)x & mask); }

static inline Vector clamp(Vector x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

// e^x = scale * (1 + fraction), with scale a power of two and fraction in about [-0.3, 0.42]; x between -87 and 88.
struct Exponential {
  explicit Exponential(Vector x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    const Vector shifted = x * 1.44269504f + kShift, whole = shifted - kShift;
    const Vector rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    Vector p = rest * 1.3981999e-3f + 8.3334519e-3f;
    p = p * rest + 4.1665795e-2f;
    p = p * rest + 1.6666665e-1f;
    p = p * rest + 0.5f;
    fraction = p * (rest * rest) + rest;
    scale = (Vector)(((Unsigned)shifted << 23) + 0x3f800000u);  // wraps where x is beyond: nothing then, and no error
  }
  Vector scale, fraction;
};

// To about 2 units in the last place; anything where x is below -87 or above 88.
static inline Vector exponential_within_range(Vector x) {
  const Exponential e(x);
  return e.scale * e.fraction + e.scale;
}

// x is kept between -87 and 88, so that the result is neither zero nor infinite.
static inline Vector exponential(Vector x) { return exponential_within_range(clamp(x, -87.0f, 88.0f)); }

static inline Vector hyperbolic_tangent(Vector x) {
  const Exponential e(clamp(x * 2.0f, -87.0f, 88.0f));
  const Vector above_one = e.scale * e.fraction + (e.scale - 1.0f);  // e^2x - 1 without cancellation near zero
  return above_one / (above_one + 2.0f);
}

// x^exponent by squarings, exponent >= 0.
static inline Vector power_of(Vector x, int exponent) {
  Vector result = splat(1.0f);
  for (; exponent > 0; exponent >>= 1, x *= x)
    if (exponent & 1) result *= x;
  return result;
}
