// One call of positive random features (FAVOR+): of u = W x' inputs^(-1/4), m = features,
//
//   kOfQueries  m^(-1/2) (exp(u - max u) + 1e-6)
//   kOfKeys     m^(-1/2) (exp(min(u - |x'|^2 / 2 - c, 40)) + 1e-6 exp(-c))
//   kRelu       m^(-1/2) (relu(u) + 1e-3)
//
// The structure is mirrored in polysketch/ops/random_features/native.py.
#pragma once

#include "memory.h"
#include "product.h"

constexpr int64_t kTokens = 32;  // worked on at once, of one head

enum RandomFeatures : int64_t { kOfQueries, kOfKeys, kRelu };

struct RandomFeaturesCall {
  int64_t batch, heads, tokens, inputs, features;
  RandomFeatures kind;
  int64_t row, input_row;  // numbers of a row of `columns` and of `rows`, whole vectors
  float scale;             // m^(-1/2)
  float epsilon;           // what is added to all features, times the scale
  float largest, constant;  // exponent of a key; c
  float input_scale;        // inputs^(-1/2): |x'|^2 = input_scale |x|^2
  Tensor x, output;         // the output backward, too
  Tensor output_gradient, x_gradient;  // backward only
  // W inputs^(-1/4): for every input a row of features, or, backward, for every feature a row of inputs.
  const float *columns, *rows;
};

// Where the blocks of tokens lie, numbered through batch and heads.
struct TokenBlock {
  int64_t batch, head, token, count;

  static TokenBlock of(const RandomFeaturesCall& call, int64_t number) {
    const int64_t blocks = (call.tokens + kTokens - 1) / kTokens, token = number % blocks * kTokens;
    const int64_t head = number / blocks;
    return {head / call.heads, head % call.heads, token, std::min(kTokens, call.tokens - token)};
  }
  Rows rows(const Tensor& x) const { return rows_of(x, batch, head, token); }
};

// A feature of an exponent, which is at most `largest`.
static inline Vector exponential_feature(const RandomFeaturesCall& call, Vector exponent) {
  return exponential_within_range(clamp(exponent, -87.0f, call.largest)) * call.scale + call.epsilon;
}

// The first `count` numbers, zeros behind.
static inline Vector load_first(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Vector found{};
  std::memcpy(&found, from, sizeof(float) * count);
  return found;
}

// The largest of `count` numbers, one or more.
static inline float largest_of(const float* from, int64_t count) {
  Vector most = splat(from[0]);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = load(from + i) > most ? load(from + i) : most;
  float found = most[0];
  for (int lane = 1; lane < kLanes; lane++) found = std::max(found, most[lane]);
  for (; i < count; i++) found = std::max(found, from[i]);
  return found;
}
