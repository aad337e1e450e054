// One call of the delta rule, and what forward and backward share. Mirrored in polysketch/ops/delta/native.py.
//
// 32 tokens at a time ask the sums of all tokens before them, or these tokens themselves, where they are few; among
// themselves they are taken one after another.
#pragma once

#include "sums.h"

struct DeltaRuleCall {
  int64_t heads, key_heads, tokens, features, value_width, factors;
  Tensor key, value, strength, errors;
  const float* sums_in;   // (batch, key_heads, expansion, value_width), contiguous; null where there are none
  Tensor query, output;   // absent where only errors are asked for
  // Backward only.
  Tensor output_gradient, query_gradient, key_gradient, value_gradient, strength_gradient;
};

constexpr int64_t kPairs = kBlock * kBlock;

// One key head of one batch row.
//
// Values are often one column wider than vectors are, by a column of ones. Then that last column travels by itself, as
// masses do in linear attention: as a whole vector it would cost as much as 16 columns.
struct DeltaHead {
  DeltaHead(const DeltaRuleCall& call, int64_t unit)
      : call(call), unit(unit), batch(unit / call.key_heads), head(unit % call.key_heads),
        shared(call.heads / call.key_heads), has_mass(call.value_width > 1 && call.value_width % kLanes == 1),
        width(call.value_width - has_mass), row(padded(width)), part(call.features / call.factors) {}

  Rows of_key(const Tensor& x, int64_t token) const { return rows_of(x, batch, head, token); }
  Rows of_query(const Tensor& x, int64_t query_head, int64_t token) const {
    return rows_of(x, batch, head * shared + query_head, token);
  }
  int64_t count(int64_t first) const { return std::min(kBlock, call.tokens - first); }

  // Values of one block: rows, and their last column where that travels by itself; zeros from `count` on.
  void read_values(Rows from, int64_t count, float* to, float* masses) const {
    read_rows(from, count, width, to, row);
    zero(to + count * row, (kBlock - count) * row);
    for (int64_t t = 0; t < kBlock; t++) masses[t] = has_mass && t < count ? from.at(t)[width] : 0.0f;
  }

  void write_values(const float* from, const float* masses, int64_t count, Rows to) const {
    write_rows(from, row, count, width, to, false);
    for (int64_t t = 0; t < count && has_mass; t++) to.at(t)[width] = masses[t];
  }

  // Weights between keys and queries of one block, [key][query], one factor after another: x, y are [feature][token].
  void weigh(const float* keys, const float* queries, float* weights) const {
    for (int64_t f = 0; f < call.factors; f++)
      product(kBlock, kBlock, part, {keys + f * part * kBlock, 1, kBlock}, {queries + f * part * kBlock, kBlock},
              {weights + f * kPairs, kBlock}, false);
  }

  const DeltaRuleCall& call;
  int64_t unit, batch, head, shared;
  bool has_mass;
  int64_t width, row, part;
};

// [key][query] with zeros where the query comes before the key, or `strictly` where it is the key's own token too.
static inline void keep_later(float* pairs, bool strictly) {
  for (int64_t key = 0; key < kBlock; key++)
    for (int64_t first = 0; first < kBlock; first += kLanes) {
      const Integers sees = lane_numbers() + static_cast<int32_t>(first) >= static_cast<int32_t>(key + strictly);
      store(pairs + key * kBlock + first, keep(load(pairs + key * kBlock + first), sees));
    }
}

static inline void multiply(const float* x, const float* y, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(x + i) * load(y + i));
}

// Tokens themselves in the place of sums over them: the same answers, by products with every token. What they cost
// grows with the tokens, and not with the size of the expansion.
class KeptTokens {
 public:
  KeptTokens(const Expansion& expansion, int64_t width)
      : features_(expansion.features), factors_(expansion.is_identity() ? 1 : 2), part_(features_ / factors_),
        width_(width), row_(padded(width)), weights_(2 * kPairs), of_weight_(kPairs), product_(kPairs) {}

  bool empty() const { return blocks_.empty(); }

  // As Sums::fold, of at most kBlock tokens.
  void fold(const float* x, int64_t, int64_t count, const float* values, const float* masses, float) {
    Block block{Buffer(features_ * kBlock), Buffer(kBlock * row_), Buffer(kBlock)};
    std::copy(x, x + features_ * kBlock, block.features + 0);
    std::copy(values, values + count * row_, block.values + 0);
    zero(block.values + count * row_, (kBlock - count) * row_);
    std::copy(masses, masses + kBlock, block.masses + 0);
    blocks_.push_back(std::move(block));
  }

  // As Sums::read.
  void read(const float* x, float, float* output, float* mass) {
    zero(mass, kBlock);
    for (const Block& block : blocks_) {
      const float* joint = weigh(block, x);
      product(kBlock, row_, kBlock, {joint, 1, kBlock}, {block.values, row_}, {output, row_}, &block != &blocks_[0]);
      for (int64_t key = 0; key < kBlock; key++) add_scaled(block.masses[key], joint + key * kBlock, mass, kBlock);
    }
  }

  // As Sums::read_backward.
  void read_backward(const float* x, float, const float* output_gradient, const float* mass_gradient, float* dx) {
    for (const Block& block : blocks_) {
      weigh(block, x);
      product(kBlock, kBlock, width_, {block.values, row_, 1}, {output_gradient, kBlock}, {of_weight_, kBlock}, false);
      for (int64_t key = 0; key < kBlock; key++)
        add_scaled(block.masses[key], mass_gradient, of_weight_ + key * kBlock, kBlock);
      for (int64_t f = 0; f < factors_; f++) {
        const int64_t at = f * part_ * kBlock;
        const float* gradient = of_weight_;
        if (factors_ == 2) {
          multiply(of_weight_, weights_ + (1 - f) * kPairs, product_, kPairs);
          gradient = product_;
        }
        product(part_, kBlock, kBlock, {block.features + at, kBlock, 1}, {gradient, kBlock}, {dx + at, kBlock}, true);
      }
    }
  }

 private:
  struct Block {
    Buffer features, values, masses;  // [feature][token], [token][row], [token]
  };

  // Weights between a block's keys and kBlock queries x[features][kBlock], [key][query]; each factor's in `weights_`.
  const float* weigh(const Block& block, const float* x) {
    for (int64_t f = 0; f < factors_; f++) {
      const int64_t at = f * part_ * kBlock;
      product(kBlock, kBlock, part_, {block.features + at, 1, kBlock}, {x + at, kBlock}, {weights_ + f * kPairs, kBlock},
              false);
    }
    if (factors_ == 1) return weights_;
    multiply(weights_, weights_ + kPairs, product_, kPairs);
    return product_;
  }

  int64_t features_, factors_, part_, width_, row_;
  Buffer weights_, of_weight_, product_;
  std::vector<Block> blocks_;
};

// Whether it takes fewer operations to read tokens themselves than sums over them. A token takes `by_sums` multiply-adds
// for every number of the sums; or, of every token of the sequence, `of_features` for every feature and `of_values` for
// every column of the values.
static inline bool are_few(const DeltaRuleCall& call, const Expansion& expansion, int64_t by_sums, int64_t of_features,
                           int64_t of_values) {
  const int64_t by_pairs = call.tokens * (of_features * call.features + of_values * call.value_width);
  return !call.sums_in && by_pairs < by_sums * expansion.size * call.value_width;
}
