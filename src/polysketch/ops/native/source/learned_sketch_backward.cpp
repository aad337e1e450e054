// The gradient of the learned sketch: activations of one block of rows are made again and used while they are in cache.
#include "learned_sketch.h"

namespace {

constexpr int64_t kBlock = kManyRows;

// What the backward pass of one half needs of its forward pass, for one block.
struct Tape {
  explicit Tape(const Half& half)
      : row(padded(half.width)), standard(half.width * kBlock), normed_rows(kBlock * row), before(half.hidden * kBlock),
        sigmoid(half.hidden * kBlock) {}

  int64_t row;
  Buffer standard, normed_rows, before, sigmoid;  // [width][kBlock], [kBlock][row], [hidden][kBlock] twice
  float inverse_deviation[kBlock];
};

// Gradients of one half's weights, summed over blocks; `down` lies transposed, and rows are padded.
struct Totals {
  explicit Totals(const Half& half)
      : width(half.width), row(padded(half.width)), size_row(padded(half.size)), scale(half.width * kLanes),
        bias(half.width * kLanes), up(half.hidden * row), down(half.hidden * size_row) {
    zero(scale, half.width * kLanes);
    zero(bias, half.width * kLanes);
    zero(up, half.hidden * row);
    zero(down, half.hidden * size_row);
  }

  void write(const Half& half, float* const* to) const {
    for (int64_t i = 0; i < width; i++) to[0][i] = sum_of(load(scale + i * kLanes));
    for (int64_t i = 0; i < width; i++) to[1][i] = sum_of(load(bias + i * kLanes));
    for (int64_t o = 0; o < half.hidden; o++)
      for (int64_t i = 0; i < width; i++) to[2][o * width + i] = up[o * row + i];
    for (int64_t j = 0; j < half.size; j++)
      for (int64_t o = 0; o < half.hidden; o++) to[3][j * half.hidden + o] = down[o * size_row + j];
  }

  int64_t width, row, size_row;
  Buffer scale, bias, up, down;
};

class Backward {
 public:
  Backward(const LearnedSketchCall& call, const Networks& networks)
      : call_(call), networks_(networks), one_(call.size * kBlock), x_(call.inputs * kBlock),
        normed_(std::max(call.inputs, call.size) * kBlock), normed_gradient_(std::max(call.inputs, call.size) * kBlock),
        active_(kHidden * kBlock), active_gradient_(kHidden * kBlock), rows_(kBlock * padded(call.size)),
        middle_(one_), x_gradient_(call.inputs * kBlock) {
    for (int64_t network = 0; network < Networks::count(call.leaves); network++)
      for (int which = 0; which < 2; which++) {
        tapes_.emplace_back(networks.half(network, which));
        totals_.emplace_back(networks.half(network, which));
      }
    for (int64_t level = call.leaves; level >= 2; level /= 2) {
      outputs_.emplace_back(level * one_);
      combined_.emplace_back(level / 2 * one_);
      gradients_.emplace_back(level * one_);
    }
  }

  void run(const MapRows<kBlock>& rows, int64_t block) {
    forward(rows, block);
    rows.read(call_.features_gradient, block, call_.size, middle_);
    zero(x_gradient_, call_.inputs * kBlock);
    std::copy(middle_ + 0, middle_ + one_, gradient_of_combined(outputs_.size() - 1));
    int64_t network = Networks::count(call_.leaves);
    for (size_t depth = outputs_.size(); depth-- > 0;) {
      const int64_t level = call_.leaves >> depth;
      network -= level;
      combine_backward(depth, level / 2);
      for (int64_t i = 0; i < level; i++) network_backward(network + i, depth, i);
    }
    rows.write(x_gradient_, block, call_.inputs, call_.x_gradient);
  }

  void write_weight_gradients() const {
    for (int64_t network = 0; network < Networks::count(call_.leaves); network++)
      for (int which = 0; which < 2; which++)
        totals_[2 * network + which].write(networks_.half(network, which), networks_.gradients(network, which));
  }

 private:
  void forward(const MapRows<kBlock>& rows, int64_t block) {
    rows.read(call_.x, block, call_.inputs, x_);
    int64_t network = 0;
    for (size_t depth = 0; depth < outputs_.size(); depth++) {
      const int64_t level = call_.leaves >> depth;
      for (int64_t i = 0; i < level; i++, network++) {
        half(network, 0, depth == 0 ? x_ + 0 : combined_[depth - 1] + i * one_, middle_);
        half(network, 1, middle_, outputs_[depth] + i * one_);
      }
      for (int64_t i = 0; i < level / 2; i++)
        combine<kBlock>(outputs_[depth] + 2 * i * one_, outputs_[depth] + (2 * i + 1) * one_, call_.size,
                combined_[depth] + i * one_);
    }
  }

  void half(int64_t network, int which, const float* inputs, float* outputs) {
    const Half half = networks_.half(network, which);
    Tape& tape = tapes_[2 * network + which];
    standardize<kBlock>(inputs, half.width, tape.standard, tape.inverse_deviation);
    scale_and_shift<kBlock>(half, tape.standard, normed_);
    transpose(normed_, half.width, tape.normed_rows, tape.row);
    for (int64_t first = 0; first < half.hidden; first += kHidden) {
      const int64_t count = std::min(kHidden, half.hidden - first);
      float *before = tape.before + first * kBlock, *sigmoid = tape.sigmoid + first * kBlock;
      product(count, kBlock, half.width, {half.up + first * half.width, half.width, 1}, {normed_, kBlock},
              {before, kBlock}, false);
      for (int64_t i = 0; i < count * kBlock; i += kLanes) {
        const Vector x = load(before + i), by = gelu_sigmoid(x);
        store(sigmoid + i, by);
        store(active_ + i, x * by);
      }
      product(half.size, kBlock, count, {half.down + first, half.hidden, 1}, {active_, kBlock}, {outputs, kBlock},
              first > 0);
    }
  }

  void network_backward(int64_t network, size_t depth, int64_t place) {
    half_backward(network, 1, gradients_[depth] + place * one_);
    normed_to_inputs(network, 1, middle_, false);
    half_backward(network, 0, middle_);
    if (depth == 0) {
      normed_to_inputs(network, 0, x_gradient_, true);
    } else {
      normed_to_inputs(network, 0, gradient_of_combined(depth - 1) + place * one_, false);
    }
  }

  // From the gradient of a half's outputs to those of its weights and of its normed inputs (in normed_gradient_).
  void half_backward(int64_t network, int which, const float* gradient) {
    const Half half = networks_.half(network, which);
    const Tape& tape = tapes_[2 * network + which];
    Totals& totals = totals_[2 * network + which];
    transpose(gradient, half.size, rows_, totals.size_row);
    for (int64_t first = 0; first < half.hidden; first += kHidden) {
      const int64_t count = std::min(kHidden, half.hidden - first);
      const float *before = tape.before + first * kBlock, *sigmoid = tape.sigmoid + first * kBlock;
      for (int64_t i = 0; i < count * kBlock; i += kLanes) store(active_ + i, load(before + i) * load(sigmoid + i));
      product(count, totals.size_row, kBlock, {active_, kBlock, 1}, {rows_, totals.size_row},
              {totals.down + first * totals.size_row, totals.size_row}, true);
      product(count, kBlock, half.size, {half.down + first, 1, half.hidden}, {gradient, kBlock},
              {active_gradient_, kBlock}, false);
      for (int64_t i = 0; i < count * kBlock; i += kLanes)
        store(active_gradient_ + i, load(active_gradient_ + i) * gelu_slope(load(before + i), load(sigmoid + i)));
      product(count, tape.row, kBlock, {active_gradient_, kBlock, 1}, {tape.normed_rows, tape.row},
              {totals.up + first * tape.row, tape.row}, true);
      product(half.width, kBlock, count, {half.up + first * half.width, 1, half.width}, {active_gradient_, kBlock},
              {normed_gradient_, kBlock}, first > 0);
    }
  }

  // Through the norm of a half, with the gradients of its scale and bias.
  void normed_to_inputs(int64_t network, int which, float* to, bool add) {
    const Half half = networks_.half(network, which);
    const Tape& tape = tapes_[2 * network + which];
    Totals& totals = totals_[2 * network + which];
    const float width = static_cast<float>(half.width);
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      Vector mean{}, along{};
      for (int64_t i = 0; i < half.width; i++) {
        const Vector g = load(normed_gradient_ + i * kBlock + t), standard = load(tape.standard + i * kBlock + t);
        store(totals.scale + i * kLanes, load(totals.scale + i * kLanes) + g * standard);
        store(totals.bias + i * kLanes, load(totals.bias + i * kLanes) + g);
        mean += g * half.scale[i];
        along += g * half.scale[i] * standard;
      }
      const Vector inverse = load(tape.inverse_deviation + t);
      for (int64_t i = 0; i < half.width; i++) {
        const Vector g = load(normed_gradient_ + i * kBlock + t), standard = load(tape.standard + i * kBlock + t);
        const Vector found = (g * half.scale[i] - mean / width - standard * (along / width)) * inverse;
        store(to + i * kBlock + t, add ? found + load(to + i * kBlock + t) : found);
      }
    }
  }

  // Gradients of the outputs of a level from those of the combined pairs, which are in the front half of the same place.
  void combine_backward(size_t depth, int64_t pairs) {
    const float* combined = combined_[depth];
    for (int64_t i = pairs - 1; i >= 0; i--) {  // from the last, whose place no other gradient is in
      const float *left = outputs_[depth] + 2 * i * one_, *right = left + one_;
      float *from = gradient_of_combined(depth) + i * one_, *to = gradients_[depth] + 2 * i * one_;
      for (int64_t j = 0; j < one_; j += kLanes) {
        const Vector y = load(combined + i * one_ + j);
        const Vector g = load(from + j) * (1.0f - y * y / static_cast<float>(call_.size));
        const Vector of_left = g * load(right + j), of_right = g * load(left + j);
        store(to + j, of_left);
        store(to + one_ + j, of_right);
      }
    }
  }

  float* gradient_of_combined(size_t depth) { return gradients_[depth]; }

  static Vector gelu_slope(Vector x, Vector sigmoid) {
    return sigmoid + x * sigmoid * (1.0f - sigmoid) * (kGeluLinear + 3.0f * kGeluCubic * (x * x));
  }

  // x[width][kBlock] -> to[kBlock][row], zeros behind.
  static void transpose(const float* x, int64_t width, float* to, int64_t row) {
    for (int64_t t = 0; t < kBlock; t++) {
      for (int64_t i = 0; i < width; i++) to[t * row + i] = x[i * kBlock + t];
      zero(to + t * row + width, row - width);
    }
  }

  const LearnedSketchCall& call_;
  const Networks& networks_;
  int64_t one_;
  Buffer x_, normed_, normed_gradient_, active_, active_gradient_, rows_, middle_, x_gradient_;
  std::vector<Tape> tapes_;
  std::vector<Totals> totals_;
  std::vector<Buffer> outputs_, combined_, gradients_;  // one for each level
};

}  // namespace

// The blocks of 32 rows first..last, counted over all maps; gradients of the weights of maps without any of them stay as they are.
// Returns 0, or 1 where memory ran out.
extern "C" int learned_sketch_backward(const LearnedSketchCall* call, int64_t first, int64_t last) {
  try {
    for_maps<kBlock>(*call, first, last, [&](int64_t map, const MapRows<kBlock>& rows, int64_t start, int64_t stop) {
      const Networks networks(*call, map);
      Backward backward(*call, networks);
      for (int64_t block = start; block < stop; block++) backward.run(rows, block);
      backward.write_weight_gradients();
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
