// Softmax over keys that come in blocks: weights of a block of queries, relative to the largest score so far.
#pragma once

#include "memory.h"
#include "product.h"

constexpr float kHidden = -1e30f;      // the score of a key that is not seen
constexpr float kLowest = -1e29f;      // the largest score of a query that has seen none: above hidden ones
constexpr float kNegligible = -87.0f;  // weights of e^x below it are zero

// e^x for x of at most 88, zero where it is negligible; NaN stays NaN.
static inline Vector weight_of(Vector x) { return keep(exponential_within_range(x), ~(Integers)(x <= kNegligible)); }

// `so_far` where it is larger than x, else x: one instruction. NaN in x need not last: its own weight is NaN, and so are
// the sums from then on.
static inline Vector larger(Vector so_far, Vector x) { return so_far > x ? so_far : x; }

// 1 / mass; zero where there is none.
static inline Vector reciprocal_or_zero(Vector mass) { return keep(1.0f / mass, (Integers)(mass > 0.0f)); }

// Of each of kQueries queries: the largest score, the sum of weights relative to it, and the sum of weighted values,
// which the caller adds up, [kQueries][row].
class RunningSoftmax {
 public:
  explicit RunningSoftmax(int64_t row) : output(kQueries * row), row_(row) {}

  // Nothing has been seen.
  void clear() {
    zero(output, kQueries * row_);
    std::fill(peak, peak + kQueries, kLowest);
    zero(mass, kQueries);
  }

  // What one query has seen, after `clear`: its mean value too.
  void resume(int64_t query, float from_peak, float from_mass, const float* mean, int64_t width) {
    peak[query] = from_peak;
    mass[query] = from_mass;
    for (int64_t i = 0; i < width; i++) output[query * row_ + i] = mean[i] * from_mass;
  }

  // Scores [key][kQueries] -> weights relative to the new peak, also added to the masses; what is there already is made
  // relative to it.
  void weigh(float* scores, int64_t keys) {
    for (int64_t v = 0; v < kQueries; v += kLanes) {
      const Vector before = load(peak + v);
      Vector highest = before, sum{};
      for (int64_t j = 0; j < keys; j++) highest = larger(highest, load(scores + j * kQueries + v));
      for (int64_t j = 0; j < keys; j++) {
        const Vector weight = weight_of(load(scores + j * kQueries + v) - highest);
        store(scores + j * kQueries + v, weight);
        sum += weight;
      }
      const Vector factor = weight_of(before - highest);
      store(factor_ + v, factor);
      store(mass + v, load(mass + v) * factor + sum);
      store(peak + v, highest);
    }
    scale_output();
  }

  // Sums of weighted values -> means; zeros where nothing was seen.
  void divide() {
    for (int64_t v = 0; v < kQueries; v += kLanes) store(factor_ + v, reciprocal_or_zero(load(mass + v)));
    scale_output();
  }

  float peak[kQueries], mass[kQueries];
  Buffer output;

 private:
  void scale_output() {
    for (int64_t t = 0; t < kQueries; t++)
      for (int64_t i = 0; i < row_; i += kLanes)
        store(output + t * row_ + i, load(output + t * row_ + i) * factor_[t]);
  }

  int64_t row_;
  float factor_[kQueries];
};

// For kQueries queries, [key][kQueries]: scores -> shares of the mass, gradients of the shares -> gradients of the
// scores. Of each query its peak, 1 / mass, and the mean of the shares' gradients.
static inline void weigh_gradients(int64_t keys, const float* peak, const float* share, const float* mean, float* weights,
                                   float* changes) {
  for (int64_t v = 0; v < kQueries; v += kLanes) {
    const Vector highest = load(peak + v), part = load(share + v), average = load(mean + v);
    for (int64_t i = v; i < keys * kQueries; i += kQueries) {
      const Vector weight = weight_of(load(weights + i) - highest) * part;
      store(weights + i, weight);
      store(changes + i, weight * (load(changes + i) - average));
    }
  }
}
