// A product of pairs of bfloat16 numbers, panel by panel. `Set` has the instructions: it packs pairs and multiplies panels.
#pragma once

#include <algorithm>

#include "bfloat16.h"

namespace {

constexpr int64_t kPairRow = 16;  // pairs and columns that the widest instruction takes at once
constexpr int64_t kPanelRows = 64, kPanelColumns = 64, kPanelPairs = 128;
constexpr int64_t kPanelDepth = 2 * kPanelPairs;

static inline int64_t in_whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// left[row][pair], a row of `pairs`; right[pair][kPanelColumns]. Zeros behind the last pair, up to a multiple of 16.
struct Panels {
  alignas(64) float left[kPanelRows * kPanelPairs];
  alignas(64) float right[kPanelPairs * kPanelColumns];
};

template <class Set>
void pack_row(const float* from, int64_t depth, float* to) {
  constexpr int64_t kOnce = 2 * kLanes;
  int64_t k = 0;
  for (; k + kOnce <= depth; k += kOnce) store(to + k / 2, Set::pairs_in_row(from + k));
  float rest[kOnce] = {};
  std::copy(from + k, from + depth, rest);
  for (; k < in_whole(depth, 2 * kPairRow); k += kOnce) {
    store(to + k / 2, Set::pairs_in_row(rest));
    std::fill(rest, rest + kOnce, 0.0f);
  }
}

static inline Vector load_some(const float* from, int64_t count) {
  if (count == kLanes) return load(from);
  Vector x{};
  if (count) std::memcpy(&x, from, count * sizeof(float));
  return x;
}

// Rows of a that lie in columns: a square of pairs at a time, turned.
template <class Set>
void pack_columns(int64_t rows, int64_t depth, Left a, int64_t pairs, float* to) {
  for (int64_t pair = 0; pair < pairs; pair += kLanes)
    for (int64_t m = 0; m < rows; m += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, rows - m);
      Vector square[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        const int64_t k = 2 * (pair + i);
        square[i] = Set::pairs(load_some(a.data + k * a.step + m, k < depth ? count : 0),
                               load_some(a.data + (k + 1) * a.step + m, k + 1 < depth ? count : 0));
      }
      transpose(square);
      for (int64_t i = 0; i < count; i++) store(to + (m + i) * pairs + pair, square[i]);
    }
}

template <class Set>
void pack_left(int64_t rows, int64_t depth, Left a, int64_t pairs, float* to) {
  if (a.step == 1) {
    for (int64_t m = 0; m < rows; m++) pack_row<Set>(a.data + m * a.row, depth, to + m * pairs);
  } else {
    pack_columns<Set>(rows, depth, a, pairs, to);
  }
  std::fill(to + rows * pairs, to + in_whole(rows, kPairRow) * pairs, 0.0f);
}

template <class Set>
void pack_right(int64_t depth, int64_t columns, Right b, int64_t pairs, float* to) {
  for (int64_t pair = 0; pair < pairs; pair++)
    for (int64_t n = 0; n < columns; n += kLanes) {
      const float* first = b.data + 2 * pair * b.step + n;
      const Vector nothing{};
      store(to + pair * kPanelColumns + n, Set::pairs(2 * pair < depth ? load(first) : nothing,
                                                      2 * pair + 1 < depth ? load(first + b.step) : nothing));
    }
}

// One of the two steps of `a` is 1.
template <class Set>
void product_of_panels(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  Panels panels;
  const Set set;  // what its instructions need, for as long as this
  for (int64_t k = 0; k < depth; k += kPanelDepth) {
    const int64_t deep = std::min(kPanelDepth, depth - k), pairs = in_whole(deep, 2 * kPairRow) / 2;
    for (int64_t n = 0; n < width; n += kPanelColumns) {
      const int64_t columns = std::min(kPanelColumns, width - n);
      pack_right<Set>(deep, columns, {b.data + k * b.step + n, b.step}, pairs, panels.right);
      for (int64_t m = 0; m < rows; m += kPanelRows) {
        const int64_t count = std::min(kPanelRows, rows - m), place = m * c.row + n;
        pack_left<Set>(count, deep, {a.data + m * a.row + k * a.step, a.row, a.step}, pairs, panels.left);
        set.multiply(count, columns, pairs, panels, {c.data + place, c.row, c.lost ? c.lost + place : nullptr}, add || k);
      }
    }
  }
}

}  // namespace
