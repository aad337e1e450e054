// Sums over tokens of expanded features times values: what linear attention carries from chunk to chunk.
//
// At power 2 the features x (r of them) are expanded to the products x_a x_b, a <= b, in row-major order, r (r + 1) / 2
// of them. A pair a < b stands for two entries of x (x) x, so a query counts it twice:
//
//   (x . y)^2 = sum over a <= b of w_ab x_a x_b y_a y_b,     w_aa = 1, w_ab = 2
//
// At power 1 the expansion is x itself; with two factors the products a_i b_j of its halves a and b, each once, i major.
// Tokens are innermost, x[i][token], but in functions of rows, which take power 1 alone: x[token][i].
//
// Beside every sum stands what its additions have rounded off so far, `lost`; a state that leaves or comes in is the
// sums alone.
#pragma once

#include <vector>

#include "bfloat16.h"
#include "memory.h"

constexpr int64_t kBlock = 32;           // query rows worked on at once
constexpr int64_t kFoldTokens = 256;     // tokens folded at once
constexpr int64_t kStripFloats = 8192;   // an expansion is made in strips of so much, to stay in the first cache
constexpr int64_t kPanel = 2 * kLanes;   // columns of a tile of a product
constexpr int64_t kRowStrip = 128;       // of tokens in rows, features worked on at once are kStripFloats by so many
constexpr int kBlockVectors = kBlock / kLanes;

class Expansion {
 public:
  Expansion(int64_t features, int64_t power, int64_t factors)
      : features(features), size(features), is_identity_(power * factors == 1), is_symmetric_(power == 2) {
    if (is_identity_) return;
    const int64_t lefts = is_symmetric_ ? features : features / 2;
    for (int32_t a = 0; a < lefts; a++)
      for (int32_t b = is_symmetric_ ? a : lefts; b < features; b++) {
        left_.push_back(a);
        right_.push_back(b);
      }
    size = static_cast<int64_t>(left_.size());
  }

  // Rows first..last of the expansion of x[features][tokens], at power 2 pairs a < b times `pairs`; in `scratch` if need
  // be.
  const float* expand(const float* x, int64_t tokens, int64_t first, int64_t last, float pairs, float* scratch) const {
    if (is_identity_) return x + first * tokens;
    for (int64_t k = first; k < last; k++) {
      const float *a = x + left_[k] * tokens, *b = x + right_[k] * tokens;
      const float weight = weight_of(k, pairs);
      float* to = scratch + (k - first) * tokens;
      for (int64_t t = 0; t < tokens; t += kLanes) store(to + t, load(a + t) * load(b + t) * weight);
    }
    return scratch;
  }

  // The adjoint of one row: adds to dx, given the gradient of row k, both for kBlock tokens.
  void contract(const float* x, int64_t k, const float* gradient, float pairs, float* dx) const {
    if (is_identity_) {
      for (int64_t t = 0; t < kBlock; t += kLanes) store(dx + k * kBlock + t, load(dx + k * kBlock + t) + load(gradient + t));
      return;
    }
    const int64_t a = left_[k] * kBlock, b = right_[k] * kBlock;
    const float weight = weight_of(k, pairs);  // on the diagonal both lines below add to the same row
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      const Vector g = load(gradient + t) * weight;
      store(dx + a + t, load(dx + a + t) + g * load(x + b + t));
      store(dx + b + t, load(dx + b + t) + g * load(x + a + t));
    }
  }

  // Whether the expansion is the features themselves: tokens may lie in rows then, and nothing is turned.
  bool is_identity() const { return is_identity_; }

  // The row of the square of feature a, at power 2.
  int64_t square(int64_t a) const { return a * features - a * (a - 1) / 2; }

  int64_t features, size;

 private:
  float weight_of(int64_t k, float pairs) const { return is_symmetric_ && left_[k] != right_[k] ? pairs : 1.0f; }

  bool is_identity_, is_symmetric_;
  std::vector<int32_t> left_, right_;
};

class Sums {
 public:
  Sums(const Expansion& expansion, int64_t width, int64_t precision = kFloat32)
      : expansion_(expansion), precision_(precision), width_(width), row_(padded(width)), sums_(expansion.size * row_),
        normalizer_(padded(expansion.size)), lost_(expansion.size * row_), lost_mass_(padded(expansion.size)),
        scratch_(kStripFloats),
        gradient_(kStripFloats) {
    clear();
  }

  void clear() {
    zero(sums_, expansion_.size * row_);
    zero(normalizer_, padded(expansion_.size));
    forget_lost();
    empty_ = true;
  }

  bool empty() const { return empty_; }

  void read_from(const float* sums, const float* normalizer) {
    for (int64_t k = 0; k < expansion_.size; k++)
      std::copy(sums + k * width_, sums + (k + 1) * width_, sums_ + k * row_);
    std::copy(normalizer, normalizer + expansion_.size, static_cast<float*>(normalizer_));
    forget_lost();
    empty_ = false;
  }

  void write_to(float* sums, float* normalizer) const {
    for (int64_t k = 0; k < expansion_.size; k++)
      std::copy(sums_ + k * row_, sums_ + k * row_ + width_, sums + k * width_);
    std::copy(static_cast<float*>(normalizer_), normalizer_ + expansion_.size, normalizer);
  }

  void scale(double factor) {
    scale(sums_, lost_, expansion_.size * row_, factor);
    scale(normalizer_, lost_mass_, expansion_.size, factor);
  }

  // Add `count` tokens, at most kFoldTokens: x[features][tokens], zeros from `count` on; values[count][row],
  // masses[tokens]. Pairs count `pairs` times.
  void fold(const float* x, int64_t tokens, int64_t count, const float* values, const float* masses, float pairs) {
    for_strips(tokens, [&](int64_t first, int64_t last) {
      const float* rows = expansion_.expand(x, tokens, first, last, pairs, scratch_);
      product(precision_, last - first, row_, count, {rows, tokens, 1}, {values, row_},
              {sums_ + first * row_, row_, lost_ + first * row_}, true);
      for (int64_t k = first; k < last; k++) {
        const float more = dot(rows + (k - first) * tokens, masses, tokens) + lost_mass_[k];
        const float before = normalizer_[k];
        normalizer_[k] = before + more;
        lost_mass_[k] = more - (normalizer_[k] - before);
      }
    });
    empty_ = false;
  }

  // The same of tokens in rows, x[count][row], zeros behind the features; where the expansion is x itself.
  void fold_rows(const float* x, int64_t row, int64_t count, const float* values, const float* masses) {
    for_strips(kRowStrip, [&](int64_t first, int64_t last) {
      product(precision_, last - first, row_, count, {x + first, 1, row}, {values, row_},
              {sums_ + first * row_, row_, lost_ + first * row_}, true);
    });
    product(1, padded(expansion_.size), count, {masses, 0, 1}, {x, row}, {normalizer_, 0, lost_mass_}, true);
    empty_ = false;
  }

  // For kBlock tokens x[features][kBlock]: output[kBlock][row] and mass[kBlock], written.
  void read(const float* x, float pairs, float* output, float* mass) {
    Vector masses[kBlockVectors] = {};
    for_strips(kBlock, [&](int64_t first, int64_t last) {
      const float* rows = expansion_.expand(x, kBlock, first, last, pairs, scratch_);
      product(precision_, kBlock, row_, last - first, {rows, 1, kBlock}, {sums_ + first * row_, row_}, {output, row_}, first > 0);
      for (int64_t k = first; k < last; k++)
        for (int v = 0; v < kBlockVectors; v++)
          masses[v] += load(rows + (k - first) * kBlock + v * kLanes) * normalizer_[k];
    });
    for (int v = 0; v < kBlockVectors; v++) store(mass + v * kLanes, masses[v]);
  }

  // The same of kBlock tokens in rows, as `fold_rows` takes them; no mass where it is null.
  void read_rows(const float* x, int64_t row, float* output, float* mass) const {
    for_strips(kRowStrip, [&](int64_t first, int64_t last) {
      product(precision_, kBlock, row_, last - first, {x + first, row, 1}, {sums_ + first * row_, row_}, {output, row_}, first > 0);
    });
    for (int64_t t = 0; t < kBlock && mass; t += kTileRows)
      dots(1, padded(expansion_.size), x + t * row, row, normalizer_, 0, {mass + t, 0});
  }

  // At power 2, what the squares of the features alone give to the mass of kBlock tokens x[features][kBlock].
  void read_squares(const float* x, float* mass) const {
    for (int v = 0; v < kBlockVectors; v++) {
      Vector total{};
      for (int64_t a = 0; a < expansion_.features; a++) {
        const Vector entry = load(x + a * kBlock + v * kLanes);
        total += entry * entry * normalizer_[expansion_.square(a)];
      }
      store(mass + v * kLanes, total);
    }
  }

  // What the squares alone give to the output of one of these tokens, times `by`, added.
  void add_squares(const float* x, float by, float* output) const {
    for (int64_t a = 0; a < expansion_.features; a++)
      add_scaled(by * x[a * kBlock] * x[a * kBlock], sums_ + expansion_.square(a) * row_, output, width_);
  }

  // The adjoint of `read` with respect to x, added to dx[features][kBlock]; gradients of output, [width][kBlock], and
  // of mass, [kBlock].
  void read_backward(const float* x, float pairs, const float* output_gradient, const float* mass_gradient, float* dx) {
    for_strips(kBlock, [&](int64_t first, int64_t last) {
      product(precision_, last - first, kBlock, width_, {sums_ + first * row_, row_, 1}, {output_gradient, kBlock},
              {gradient_, kBlock}, false);
      for (int64_t k = first; k < last; k++) {
        float* row = gradient_ + (k - first) * kBlock;
        for (int64_t t = 0; t < kBlock; t += kLanes)
          store(row + t, load(row + t) + load(mass_gradient + t) * normalizer_[k]);
        expansion_.contract(x, k, row, pairs, dx);
      }
    });
  }

  // The adjoint of `read_rows`, some features after others: work(first, last, gradient[last - first][kBlock]).
  template <class Work>
  void read_rows_backward(const float* output_gradient, const float* mass_gradient, Work work) {
    for_strips(kRowStrip, [&](int64_t first, int64_t last) {
      const Result gradient{gradient_, kBlock};
      product(last - first, kBlock, 1, {normalizer_ + first, 1, 0}, {mass_gradient, 0}, gradient, false);
      product(precision_, last - first, kBlock, width_, {sums_ + first * row_, row_, 1}, {output_gradient, kBlock}, gradient, true);
      work(first, last, static_cast<float*>(gradient_));
    });
  }

 private:
  void forget_lost() {
    zero(lost_, expansion_.size * row_);
    zero(lost_mass_, padded(expansion_.size));
  }

  // The factor is the sum of two floats, and what a product rounds off is known where products and sums are fused.
  static void scale(float* sums, float* lost, int64_t count, double factor) {
    const float by = static_cast<float>(factor), rest = static_cast<float>(factor - by);
    for (int64_t i = 0; i < count; i++) {
      const float scaled = sums[i] * by;
      lost[i] = lost[i] * by + (product_error(sums[i], by, scaled) + sums[i] * rest);
      sums[i] = scaled;
    }
  }

  template <class Work>
  void for_strips(int64_t tokens, Work work) const {
    const int64_t rows = std::max<int64_t>(kTileRows, kStripFloats / tokens);
    for (int64_t first = 0; first < expansion_.size; first += rows) work(first, std::min(first + rows, expansion_.size));
  }

  const Expansion& expansion_;
  int64_t precision_;  // of products of features and values; masses are in float32
  int64_t width_, row_;
  Buffer sums_, normalizer_, lost_, lost_mass_, scratch_, gradient_;
  bool empty_ = true;
};
