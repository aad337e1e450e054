// Small matrix products whose operands are in cache.
//
//   c[m][n] (+)= sum over k of a[m][k] b[k][n],   n innermost in b and c, n a multiple of the lanes
//
// a may lie in any order: a[m][k] is a[m * a_row + k * a_step]. Each entry of a is spread over a vector, so that only b
// and c need to be contiguous; sums of a tile stay in registers.
//
// With `lost`, of the layout of c, the whole sum over k is added to c at once, and what that addition rounds off is kept
// in `lost` and goes into the next one (Kahan's summation): the error of c does not grow with the number of products.
#pragma once

#include "vector.h"

constexpr int64_t kQueries = 32;  // of exact attention, worked on at once: columns of products
constexpr int kQueryVectors = kQueries / kLanes;

struct Left {
  const float* data;
  int64_t row, step;
};

struct Right {
  const float* data;
  int64_t step;
};

struct Result {
  float* data;
  int64_t row;
  float* lost = nullptr;
};

// How a column of b adds to a sum: numbers times numbers. Those of bfloat16.h are pairs of them.
struct Numbers {
  static Vector add(Vector sum, float left, Vector right) { return sum + left * right; }
};

static inline void add_compensated(float* total, float* lost, Vector x) {
  const Vector more = x + load(lost), before = load(total), after = before + more;
  store(total, after);
  store(lost, more - (after - before));
}

template <int kRows, int kColumns, class Terms>
[[gnu::always_inline]] static inline void tile(int64_t depth, Left a, Right b, Result c, bool add) {
  Vector sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n++) sums[m][n] = add && !c.lost ? load(c.data + m * c.row + n * kLanes) : Vector{};
  const float* left = a.data;
  const float* right = b.data;
  for (int64_t k = 0; k < depth; k++, left += a.step, right += b.step) {
    Vector row[kColumns];
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n++) row[n] = load(right + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
      for (int n = 0; n < kColumns; n++) sums[m][n] = Terms::add(sums[m][n], left[m * a.row], row[n]);
  }
  if (c.lost) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
      for (int n = 0; n < kColumns; n++)
        add_compensated(c.data + m * c.row + n * kLanes, c.lost + m * c.row + n * kLanes, sums[m][n]);
    return;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n++) store(c.data + m * c.row + n * kLanes, sums[m][n]);
}

template <int kColumns, class Terms>
[[gnu::always_inline]] static inline void columns(int64_t rows, int64_t depth, Left a, Right b, Result c, bool add) {
  int64_t m = 0;
  auto left = [&](int64_t m) { return Left{a.data + m * a.row, a.row, a.step}; };
  auto result = [&](int64_t m) { return Result{c.data + m * c.row, c.row, c.lost ? c.lost + m * c.row : nullptr}; };
  for (; kTallRows > kTileRows && (rows - m == kTallRows || rows - m >= kTallRows + 4); m += kTallRows)
    tile<kTallRows, kColumns, Terms>(depth, left(m), b, result(m), add);
  for (; m + kTileRows <= rows; m += kTileRows) tile<kTileRows, kColumns, Terms>(depth, left(m), b, result(m), add);
  for (; m + 4 <= rows; m += 4) tile<4, kColumns, Terms>(depth, left(m), b, result(m), add);
  for (; m < rows; m++) tile<1, kColumns, Terms>(depth, left(m), b, result(m), add);
}

template <class Terms = Numbers>
static void product(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  auto result = [&](int64_t n) { return Result{c.data + n, c.row, c.lost ? c.lost + n : nullptr}; };
  int64_t n = 0;
  for (; rows == 1 && n + 8 * kLanes <= width; n += 8 * kLanes)  // one row alone waits for its two sums
    tile<1, 8, Terms>(depth, a, {b.data + n, b.step}, result(n), add);
  for (; n + 2 * kLanes <= width; n += 2 * kLanes)
    columns<2, Terms>(rows, depth, a, {b.data + n, b.step}, result(n), add);
  for (; n < width; n += kLanes) columns<1, Terms>(rows, depth, a, {b.data + n, b.step}, result(n), add);
}

// Dot products of rows: c[n][m] = sum over k of a[m][k] b[n][k], k innermost in a and b, `depth` a multiple of the lanes;
// kTileRows rows of a, which are innermost in c.
template <int kColumns>
static inline void dots_tile(int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row, Result c) {
  constexpr int kSums = (kTileRows * kColumns + kLanes - 1) / kLanes * kLanes;
  Vector sums[kSums] = {};
  for (int64_t k = 0; k < depth; k += kLanes)
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; m++) {
      const Vector left = load(a + m * a_row + k);
#pragma GCC unroll 2
      for (int n = 0; n < kColumns; n++) sums[n * kTileRows + m] += left * load(b + n * b_row + k);
    }
  float totals[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += kLanes) store(totals + i, sums_of_rows(reinterpret_cast<Vector(&)[kLanes]>(sums[i])));
  for (int n = 0; n < kColumns; n++) std::memcpy(c.data + n * c.row, totals + n * kTileRows, sizeof(float) * kTileRows);
}

// kTileRows rows of a, any count of rows of b.
static inline void dots(int64_t count, int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_row,
                        Result c) {
  int64_t n = 0;
  for (; n + 2 <= count; n += 2) dots_tile<2>(depth, a, a_row, b + n * b_row, b_row, {c.data + n * c.row, c.row});
  if (n < count) dots_tile<1>(depth, a, a_row, b + n * b_row, b_row, {c.data + n * c.row, c.row});
}
