// One call of decoding with a window and sums under the delta rule.
#pragma once

#include "memory.h"

// u . hidden + b of each key head; without weights b alone.
struct HeadLogit {
  const float *weight, *bias;
  float of(const float* hidden, int64_t hidden_size, int64_t head) const {
    return bias[head] + (weight ? dot(weight + head * hidden_size, hidden, hidden_size) : 0.0f);
  }
};

// Mirrored in polysketch/ops/delta/one_token.py. In a slot of ring_key lie a key, its two sketches and the strength with
// which it is to be written.
struct PolysketchOneCall {
  int64_t heads, key_heads, width, sketched_width, sketch_size, value_width, window, hidden_size;
  int64_t normed, removed;  // whether queries and keys get a norm; whether nothing stands beside the window
  int64_t kind, ring_kind;  // of the numbers of the sums and of the ring, as in ExtendCall
  Tensor query, key, value, sketched_query, sketched_key, hidden, output;
  const float* sketches;  // (key_heads, sketched_width, 2 sketch_size)
  HeadLogit strength, far;
  const float *confidence_scale, *log_scale;  // (key_heads,)
  Tensor ring_key, ring_value;
  uint8_t* real;  // (rows, window), not zero in a slot that holds a real token, with this stride of rows
  int64_t real_row;
  Tensor sums, normalizer, log_decay_total;
  const int64_t *position, *ring_rows, *sums_rows;  // (batch,): tokens before; the rows of ring and sums, or null
};
