// The gradient of positive random features with respect to their inputs, from the features: what is in them besides
// epsilon is the derivative by the exponent.
#include "random_features.h"

namespace {

class Backward {
 public:
  explicit Backward(const RandomFeaturesCall& call)
      : call_(call), row_(odd_lines(call.features)), gradient_(kTokens * row_), x_gradient_(kTokens * call.input_row),
        largest_(exponential_feature(call, splat(call.largest))[0]) {}

  void run(TokenBlock block) {
    const Rows features = block.rows(call_.output), upstream = block.rows(call_.output_gradient);
    float totals[kTokens];
    for (int64_t t = 0; t < block.count; t++)
      totals[t] = through_feature(features.at(t), upstream.at(t), gradient_ + t * row_);
    product(block.count, padded(call_.inputs), call_.features, {gradient_, row_, 1}, {call_.rows, call_.input_row},
            {x_gradient_, call_.input_row}, false);
    const Rows x = block.rows(call_.x), to = block.rows(call_.x_gradient);
    for (int64_t t = 0; t < block.count && call_.kind == kOfKeys; t++)  // of |x'|^2 / 2
      add_scaled(-totals[t] * call_.input_scale, x.at(t), x_gradient_ + t * call_.input_row, call_.inputs);
    write_rows(x_gradient_, call_.input_row, block.count, call_.inputs, to, false);
  }

 private:
  // The gradient of the projections of a token, zeros behind; returns its sum.
  float through_feature(const float* features, const float* upstream, float* to) const {
    Vector total{};
    for (int64_t i = 0; i < call_.features; i += kLanes) {
      const int64_t count = call_.features - i;
      const Vector gradient = derivative(load_first(features + i, count)) * load_first(upstream + i, count);
      store(to + i, gradient);
      total += gradient;
    }
    const float sum = sum_of(total);
    if (call_.kind == kOfQueries) through_maximum(features, sum, to);
    return sum;
  }

  // What is taken from all exponents of a query: the largest, or in equal shares several that are as large.
  void through_maximum(const float* features, float total, float* to) const {
    const float most = largest_of(features, call_.features);
    const float share = total / static_cast<float>(std::count(features, features + call_.features, most));
    for (int64_t i = 0; i < call_.features; i++) to[i] -= features[i] == most ? share : 0.0f;
  }

  // Of a feature by its projection.
  Vector derivative(Vector feature) const {
    const Vector without = feature > call_.epsilon ? feature - call_.epsilon : Vector{};
    if (call_.kind == kRelu) return without > 0.0f ? splat(call_.scale) : Vector{};
    return feature < largest_ ? without : Vector{};
  }

  const RandomFeaturesCall& call_;
  int64_t row_;
  Buffer gradient_;    // [kTokens][row_]
  Buffer x_gradient_;  // [kTokens][input_row]
  float largest_;      // a feature that its bound made
};

}  // namespace

// The blocks of tokens first..last. Returns 0, or 1 where memory ran out.
extern "C" int random_features_backward(const RandomFeaturesCall* call, int64_t first, int64_t last) {
  try {
    Backward backward(*call);
    for (int64_t block = first; block < last; block++) backward.run(TokenBlock::of(*call, block));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
