// One call of the low-rank polynomial sketch: features are sums of products of linear maps,
//
//   f[t][m] = sum over s < rank of prod over j < degree of (x theta_sj)[t][m]
//
// The structure is mirrored in polysketch/ops/low_rank_sketch/native.py. Tokens are worked on in blocks and features in
// strips, so that every factor of a product is in the first cache when the next one is made.
#pragma once

#include "memory.h"
#include "product.h"

constexpr int64_t kTokens = 32;         // worked on at once
constexpr int64_t kStripFeatures = 64;  // likewise
constexpr int64_t kStrip = kTokens * kStripFeatures;

struct LowRankSketchCall {
  int64_t batch, heads, maps, tokens, inputs, features, rank, degree;
  int64_t row, input_row;  // numbers of a row of `factors` and of `turned`, whole vectors
  int64_t parts;           // of the tokens: each of a map is a unit of work
  Tensor x, output;
  const float* factors;  // (maps, rank, degree, inputs, row)
  // Backward only: factors with rows for features, the gradient of the output, and where those of the inputs go.
  const float* turned;  // (maps, rank, degree, features, input_row)
  Tensor output_gradient, x_gradient;
  float* factor_gradients;  // (units, rank, degree, inputs, row), added to
};

// What a unit works on: a part of the tokens of the heads that share one map.
class SketchUnit {
 public:
  SketchUnit(const LowRankSketchCall& call, int64_t number)
      : call_(call), map_(number / call.parts), first_(call.tokens * (number % call.parts) / call.parts),
        last_(call.tokens * (number % call.parts + 1) / call.parts) {}

  // Calls work(batch, head, token, count) for all blocks of tokens.
  template <class Work>
  void for_blocks(Work work) const {
    const int64_t shared = call_.heads / call_.maps;
    for (int64_t batch = 0; batch < call_.batch; batch++)
      for (int64_t head = map_ * shared; head < (map_ + 1) * shared; head++)
        for (int64_t token = first_; token < last_; token += kTokens)
          work(batch, head, token, std::min(kTokens, last_ - token));
  }

  // Calls work(first feature, how many, the same in whole vectors) for all strips of features.
  template <class Work>
  void for_strips(Work work) const {
    for (int64_t first = 0; first < call_.features; first += kStripFeatures) {
      const int64_t width = std::min(kStripFeatures, call_.features - first);
      work(first, width, padded(width));
    }
  }

  // The place of a factor among those of its map.
  int64_t factor(int64_t term, int64_t number) const { return term * call_.degree + number; }
  // Columns of a factor from one feature on.
  Right columns(int64_t term, int64_t number, int64_t feature) const {
    const int64_t place = map_ * call_.rank * call_.degree + factor(term, number);
    return {call_.factors + place * call_.inputs * call_.row + feature, call_.row};
  }
  // The same as rows, one for each feature.
  Right rows(int64_t term, int64_t number, int64_t feature) const {
    const int64_t place = map_ * call_.rank * call_.degree + factor(term, number);
    return {call_.turned + (place * call_.features + feature) * call_.input_row, call_.input_row};
  }

  // to[count][kStripFeatures] = x times some columns of a factor.
  void linear_map(Rows x, int64_t count, int64_t width, Right columns, float* to) const {
    product(count, width, call_.inputs, {x.data, x.token, 1}, columns, {to, kStripFeatures}, false);
  }

 private:
  const LowRankSketchCall& call_;
  int64_t map_, first_, last_;
};

// to *= by, entrywise, for `count` tokens.
static inline void multiply(float* __restrict to, const float* __restrict by, int64_t count) {
  for (int64_t i = 0; i < count * kStripFeatures; i += kLanes) store(to + i, load(to + i) * load(by + i));
}
