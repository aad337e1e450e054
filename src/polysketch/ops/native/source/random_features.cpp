// Positive random features, forward: "Rethinking Attention with Performers", section 2.
#include "random_features.h"

namespace {

class Forward {
 public:
  explicit Forward(const RandomFeaturesCall& call)
      : call_(call), row_(odd_lines(call.features)), projected_(kTokens * row_) {}

  void run(TokenBlock block) {
    const Rows x = block.rows(call_.x), output = block.rows(call_.output);
    product(block.count, padded(call_.features), call_.inputs, {x.data, x.token, 1}, {call_.columns, call_.row},
            {projected_, row_}, false);
    for (int64_t t = 0; t < block.count; t++) {
      const float* projected = projected_ + t * row_;
      if (call_.kind == kRelu) {
        write(projected, output.at(t), [&](Vector u) { return (u < 0.0f ? Vector{} : u) * call_.scale + call_.epsilon; });
      } else {
        const float shift = call_.kind == kOfKeys ? key_shift(x.at(t)) : largest_of(projected, call_.features);
        write(projected, output.at(t), [&](Vector u) { return exponential_feature(call_, u - shift); });
      }
    }
  }

 private:
  float key_shift(const float* x) const {
    return 0.5f * call_.input_scale * dot(x, x, call_.inputs) + call_.constant;
  }

  // to = feature(projected), of all features.
  template <class Feature>
  void write(const float* projected, float* to, Feature feature) const {
    int64_t i = 0;
    for (; i + kLanes <= call_.features; i += kLanes) store(to + i, feature(load(projected + i)));
    if (i == call_.features) return;
    const Vector last = feature(load(projected + i));
    std::memcpy(to + i, &last, sizeof(float) * (call_.features - i));
  }

  const RandomFeaturesCall& call_;
  int64_t row_;
  Buffer projected_;  // [kTokens][row_]
};

}  // namespace

// The blocks of tokens first..last. Returns 0, or 1 where memory ran out.
extern "C" int random_features_forward(const RandomFeaturesCall* call, int64_t first, int64_t last) {
  try {
    Forward forward(*call);
    for (int64_t block = first; block < last; block++) forward.run(TokenBlock::of(*call, block));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
