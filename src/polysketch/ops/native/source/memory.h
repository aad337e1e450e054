// Scratch memory, and rows of tensors in and out of it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "vector.h"

static inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
static inline int64_t padded(int64_t width) { return round_up(width, kLanes); }

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

// (count, width) -> to[i * stride + t]: tokens innermost, zeros up to `stride`.
static inline void read_columns(Rows from, int64_t count, int64_t width, float* to, int64_t stride) {
  for (int64_t t = 0; t < count; t++) {
    const float* source = from.at(t);
    for (int64_t i = 0; i < width; i++) to[i * stride + t] = source[i];
  }
  if (count < stride)
    for (int64_t i = 0; i < width; i++) zero(to + i * stride + count, stride - count);
}

// The inverse of `read_columns`; `add` adds to what is there.
static inline void write_columns(const float* from, int64_t stride, int64_t count, int64_t width, Rows to, bool add) {
  for (int64_t t = 0; t < count; t++) {
    float* target = to.at(t);
    for (int64_t i = 0; i < width; i++) target[i] = from[i * stride + t] + (add ? target[i] : 0.0f);
  }
}

static inline void write_rows(const float* from, int64_t row, int64_t count, int64_t width, Rows to, bool add) {
  for (int64_t t = 0; t < count; t++) {
    float* target = to.at(t);
    for (int64_t i = 0; i < width; i++) target[i] = from[t * row + i] + (add ? target[i] : 0.0f);
  }
}
