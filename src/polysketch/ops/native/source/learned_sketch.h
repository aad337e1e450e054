// The networks of the learned sketch (PolySketchFormer, Algorithm 2 and appendix D) on a block of rows at a time, with
// rows innermost: x[i][row]. The structures are mirrored in polysketch/ops/learned_sketch/native.py.
#pragma once

#include "bfloat16.h"
#include "memory.h"
#include "product.h"

#include <vector>

constexpr int64_t kManyRows = 32, kFewRows = kLanes;  // rows worked on at once, kBlock below: few only in decoding
constexpr int64_t kHidden = 64;  // hidden units worked on at once: they stay in the first cache
constexpr float kNormEpsilon = 1e-5f;
constexpr int kTensors = 4;  // of a stage

enum { kGelu, kRelu, kSilu };  // activation of a call

struct LearnedSketchCall {
  int64_t batch, heads, length, inputs, size, hidden, leaves, depth, maps, activation, precision;
  Tensor x, features;
  const float* const* weights;  // for every map, every network, every stage, its four tensors
  // Backward only.
  Tensor features_gradient, x_gradient;
  float* const* weight_gradients;  // in the order of the weights, written
};

// One stage of a network: a norm, up, activation, down.
struct Stage {
  int64_t width, hidden, size;
  const float *scale, *bias, *up, *down;  // (width), (width), (hidden, width), (size, hidden)
};

// The networks of one map; network i's stages.
class Networks {
 public:
  Networks(const LearnedSketchCall& call, int64_t map) : call_(call), first_(map * count(call.leaves)) {}

  static int64_t count(int64_t leaves) { return 2 * leaves - 2; }
  Stage stage(int64_t network, int64_t which) const {
    const float* const* tensors = call_.weights + place(network, which);
    const int64_t width = which == 0 && network < call_.leaves ? call_.inputs : call_.size;
    return {width, call_.hidden, call_.size, tensors[0], tensors[1], tensors[2], tensors[3]};
  }
  float* const* gradients(int64_t network, int64_t which) const {
    return call_.weight_gradients + place(network, which);
  }

 private:
  int64_t place(int64_t network, int64_t which) const {
    return ((first_ + network) * call_.depth + which) * kTensors;
  }

  const LearnedSketchCall& call_;
  int64_t first_;
};

// The rows of one map, counted over batch, its heads and length.
template <int64_t kBlock>
class MapRows {
 public:
  MapRows(const LearnedSketchCall& call, int64_t map)
      : call_(call), group_(call.heads / call.maps), first_head_(map * group_) {}

  int64_t count() const { return call_.batch * group_ * call_.length; }
  int64_t blocks() const { return (count() + kBlock - 1) / kBlock; }
  int64_t in_block(int64_t block) const { return std::min(kBlock, count() - block * kBlock); }
  float* at(const Tensor& x, int64_t row) const {
    const int64_t head = row / call_.length;
    return x.at(head / group_, first_head_ + head % group_, row % call_.length);
  }

  void read(const Tensor& from, int64_t block, int64_t width, float* to) const {
    zero(to, width * kBlock);
    for (int64_t t = 0; t < in_block(block); t++) {
      const float* source = at(from, block * kBlock + t);
      for (int64_t i = 0; i < width; i++) to[i * kBlock + t] = source[i];
    }
  }

  void write(const float* from, int64_t block, int64_t width, const Tensor& to) const {
    for (int64_t t = 0; t < in_block(block); t++) {
      float* target = at(to, block * kBlock + t);
      for (int64_t i = 0; i < width; i++) target[i] = from[i * kBlock + t];
    }
  }

 private:
  const LearnedSketchCall& call_;
  int64_t group_, first_head_;
};

// Calls work(map, its rows, first block, last block) for the blocks first..last, counted over all maps.
template <int64_t kBlock, class Work>
static void for_maps(const LearnedSketchCall& call, int64_t first, int64_t last, Work work) {
  const int64_t blocks = MapRows<kBlock>(call, 0).blocks();
  for (int64_t map = first / blocks; map * blocks < last; map++)
    work(map, MapRows<kBlock>(call, map), std::max<int64_t>(first - map * blocks, 0), std::min(last - map * blocks, blocks));
}

// x[width][kBlock] -> standard = (x - mean) / deviation, and 1 / deviation of each row.
template <int64_t kBlock>
static inline void standardize(const float* x, int64_t width, float* standard, float* inverse_deviation) {
  for (int64_t t = 0; t < kBlock; t += kLanes) {
    Vector mean{}, variance{};
    for (int64_t i = 0; i < width; i++) mean += load(x + i * kBlock + t);
    mean /= static_cast<float>(width);
    for (int64_t i = 0; i < width; i++) {
      const Vector difference = load(x + i * kBlock + t) - mean;
      variance += difference * difference;
    }
    store(inverse_deviation + t, variance / static_cast<float>(width) + kNormEpsilon);
    for (int lane = 0; lane < kLanes; lane++)
      inverse_deviation[t + lane] = 1.0f / std::sqrt(inverse_deviation[t + lane]);
    const Vector inverse = load(inverse_deviation + t);
    for (int64_t i = 0; i < width; i++)
      store(standard + i * kBlock + t, (load(x + i * kBlock + t) - mean) * inverse);
  }
}

template <int64_t kBlock>
static inline void scale_and_shift(const Stage& stage, const float* standard, float* normed) {
  for (int64_t i = 0; i < stage.width; i++)
    for (int64_t t = 0; t < kBlock; t += kLanes)
      store(normed + i * kBlock + t, load(standard + i * kBlock + t) * stage.scale[i] + stage.bias[i]);
}

// Activations: the result at x is of(x, gate(x)), the derivative slope(x, gate(x)).

// The tanh form, which is x sigmoid(z(x)), z = x (a + b x^2).
struct Gelu {
  static constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548162726f;

  static Vector gate(Vector x) {
    const Vector z = x * (kLinear + kCubic * (x * x));
    return reciprocal(1.0f + exponential(-z));
  }
  static Vector of(Vector x, Vector gate) { return x * gate; }
  static Vector slope(Vector x, Vector gate) {
    return gate + x * gate * (1.0f - gate) * (kLinear + 3.0f * kCubic * (x * x));
  }
};

struct Relu {
  static Vector gate(Vector x) { return x > 0.0f ? splat(1.0f) : splat(0.0f); }
  static Vector of(Vector x, Vector) { return x < 0.0f ? splat(0.0f) : x; }  // what is not a number stays so
  static Vector slope(Vector, Vector gate) { return gate; }
};

struct Silu {
  static Vector gate(Vector x) { return reciprocal(1.0f + exponential(-x)); }
  static Vector of(Vector x, Vector gate) { return x * gate; }
  static Vector slope(Vector x, Vector gate) { return gate + x * gate * (1.0f - gate); }
};

// Calls work with the activation of a call.
template <class Work>
static inline void with_activation(const LearnedSketchCall& call, Work work) {
  if (call.activation == kGelu) work(Gelu());
  if (call.activation == kRelu) work(Relu());
  if (call.activation == kSilu) work(Silu());
}

// sqrt(r) tanh(sqrt(1/r) left * right), all [size][kBlock].
template <int64_t kBlock>
static inline void combine(const float* left, const float* right, int64_t size, float* to) {
  const float root = std::sqrt(static_cast<float>(size));
  for (int64_t i = 0; i < size * kBlock; i += kLanes)
    store(to + i, hyperbolic_tangent(load(left + i) * load(right + i) * (1.0f / root)) * root);
}
