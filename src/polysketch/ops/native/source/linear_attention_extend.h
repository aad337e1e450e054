// One token of linear attention against its state.
#pragma once

#include "memory.h"

// Mirrored in polysketch/ops/linear/native.py. What a state has of one key head lies in one piece, its heads and rows
// anywhere; `rows` says which row of the state each row of the batch has, its own where there is none.
struct ExtendCall {
  int64_t heads, key_heads, features, value_width, local_width, power, factors, normalize, degree, chunk, expanded;
  int64_t kind;  // of the sums: 0 float32, 1 bfloat16, 2 float16
  float offset;
  Tensor query, key, value, local_query, local_key, log_decay, output, denominator;
  Tensor strength;  // of writing by the delta rule; absent where sums take values as they are
  Tensor sums, normalizer, log_decay_total, state_features, state_value, state_key, state_log_decay;
  const int64_t *position, *rows;
};

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int linear_attention_extend(const ExtendCall* call, int64_t first, int64_t last);
