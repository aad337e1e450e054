// Scratch memory, and rows of tensors in and out of it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "vector.h"

// A mass at power 2 that is less than so much of what the squares x_a^2 y_a^2 alone hold, rounding may have made.
// Mirrored in polysketch/ops/linear/resolution.py.
constexpr float kResolved = 0x1p-12f;

static inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
static inline int64_t padded(int64_t width) { return round_up(width, kLanes); }
// A row of an odd number of cache lines: rows a power of two apart would drive one another out of the first cache.
static inline int64_t odd_lines(int64_t width) { return round_up(width, 32) + 16; }

// Uninitialised floats on a cache line's boundary.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : data_(allocate(count)) {}
  Buffer(Buffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Buffer() { std::free(data_); }
  operator float*() const { return data_; }

 private:
  static float* allocate(int64_t count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, std::max<int64_t>(count, 1) * sizeof(float))) throw std::bad_alloc();
    return static_cast<float*>(memory);
  }
  float* data_ = nullptr;
};

static inline void zero(float* to, int64_t count) { std::fill(to, to + count, 0.0f); }

// A tensor (batch, heads, tokens, width) of any strides but the last, which is 1; no data where it is absent.
struct Tensor {
  float* data;
  int64_t batch, head, token;
  float* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
  explicit operator bool() const { return data != nullptr; }
};

// The rows of one head of a tensor.
struct Rows {
  float* data;
  int64_t token;
  float* at(int64_t t) const { return data + t * token; }
};

static inline Rows rows_of(const Tensor& x, int64_t batch, int64_t head, int64_t start) {
  return {x.at(batch, head, start), x.token};
}

// (count, width) -> to[row][width padded to `row`], zeros behind; row t times factor[t] where that is given.
static inline void read_rows(Rows from, int64_t count, int64_t width, float* to, int64_t row,
                             const float* factor = nullptr) {
  for (int64_t t = 0; t < count; t++) {
    const float* source = from.at(t);
    const float by = factor ? factor[t] : 1.0f;
    for (int64_t i = 0; i < width; i++) to[t * row + i] = source[i] * by;
    zero(to + t * row + width, row - width);
  }
}

// A square of numbers, its rows `from_row` apart, and its columns, `to_row` apart; `add` adds to what is there.
static inline void turn_square(const float* from, int64_t from_row, float* to, int64_t to_row, bool add) {
  Vector rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) rows[i] = load(from + i * from_row);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(to + i * to_row, add ? load(to + i * to_row) + rows[i] : rows[i]);
}

// to[i * to_row + t] = from[t * from_row + i] for t < count, i < width.
static inline void turn(const float* from, int64_t from_row, int64_t count, int64_t width, float* to, int64_t to_row,
                        bool add) {
  const int64_t whole = count / kLanes * kLanes, whole_width = width / kLanes * kLanes;
  for (int64_t t = 0; t < whole; t += kLanes)
    for (int64_t i = 0; i < whole_width; i += kLanes)
      turn_square(from + t * from_row + i, from_row, to + i * to_row + t, to_row, add);
  for (int64_t t = 0; t < count; t++)
    for (int64_t i = t < whole ? whole_width : 0; i < width; i++) {
      float& target = to[i * to_row + t];
      target = from[t * from_row + i] + (add ? target : 0.0f);
    }
}

// (count, width) -> to[i * stride + t]: tokens innermost, zeros up to `stride`.
static inline void read_columns(Rows from, int64_t count, int64_t width, float* to, int64_t stride) {
  turn(from.data, from.token, count, width, to, stride, false);
  if (count < stride)
    for (int64_t i = 0; i < width; i++) zero(to + i * stride + count, stride - count);
}

// The inverse of `read_columns`; `add` adds to what is there.
// A few rows at a time, each from its begin to its end: many, a power of two apart, would not stay in the first cache.
static inline void write_columns(const float* from, int64_t stride, int64_t count, int64_t width, Rows to, bool add) {
  for (int64_t t = 0; t < count; t += kLanes)
    turn(from + t, stride, width, std::min<int64_t>(kLanes, count - t), to.at(t), to.token, add);
}

static inline void write_rows(const float* from, int64_t row, int64_t count, int64_t width, Rows to, bool add) {
  for (int64_t t = 0; t < count; t++) {
    float* target = to.at(t);
    for (int64_t i = 0; i < width; i++) target[i] = from[t * row + i] + (add ? target[i] : 0.0f);
  }
}
