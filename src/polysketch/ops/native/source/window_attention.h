// One call of softmax attention within a window, and what forward and backward share. The structure is mirrored in
// polysketch/ops/window/native.py.
#pragma once

#include "running_softmax.h"
#include "seen_pairs.h"

struct WindowAttentionCall : PairsCall {
  Tensor beside_logit, beside_value;  // of one key more for each query
  Tensor output, peak, mass;          // weights are exp(score - peak), and their sum is mass
  // Backward only: the gradient of the output, and where those of the inputs go.
  Tensor output_gradient;
  Tensor query_gradient, key_gradient, value_gradient, beside_logit_gradient, beside_value_gradient;
};

// As `window_attention_forward`, for calls of one query and one span.
extern "C" int window_attention_one(const WindowAttentionCall* call, int64_t first, int64_t last);
