// The gradient of the learned sketch: activations of one block of rows are made again and used while they are in cache.
#include "learned_sketch.h"

namespace {

constexpr int64_t kBlock = kManyRows;

// What the backward pass of one stage needs of its forward pass, for one block.
struct Tape {
  explicit Tape(const Stage& stage)
      : row(padded(stage.width)), standard(stage.width * kBlock), normed_rows(kBlock * row), before(stage.hidden * kBlock),
        gate(stage.hidden * kBlock) {}

  int64_t row;
  Buffer standard, normed_rows, before, gate;  // [width][kBlock], [kBlock][row], [hidden][kBlock] twice
  float inverse_deviation[kBlock];
};

// Gradients of one stage's weights, summed over blocks; `down` lies transposed, and rows are padded.
struct Totals {
  explicit Totals(const Stage& stage)
      : width(stage.width), row(padded(stage.width)), size_row(padded(stage.size)), scale(stage.width * kLanes),
        bias(stage.width * kLanes), up(stage.hidden * row), down(stage.hidden * size_row) {
    zero(scale, stage.width * kLanes);
    zero(bias, stage.width * kLanes);
    zero(up, stage.hidden * row);
    zero(down, stage.hidden * size_row);
  }

  void write(const Stage& stage, float* const* to) const {
    for (int64_t i = 0; i < width; i++) to[0][i] = sum_of(load(scale + i * kLanes));
    for (int64_t i = 0; i < width; i++) to[1][i] = sum_of(load(bias + i * kLanes));
    for (int64_t o = 0; o < stage.hidden; o++)
      for (int64_t i = 0; i < width; i++) to[2][o * width + i] = up[o * row + i];
    for (int64_t j = 0; j < stage.size; j++)
      for (int64_t o = 0; o < stage.hidden; o++) to[3][j * stage.hidden + o] = down[o * size_row + j];
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
      for (int64_t which = 0; which < call_.depth; which++) {
        tapes_.emplace_back(networks.stage(network, which));
        totals_.emplace_back(networks.stage(network, which));
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
    for (size_t step = outputs_.size(); step-- > 0;) {
      const int64_t level = call_.leaves >> step;
      network -= level;
      combine_backward(step, level / 2);
      for (int64_t i = 0; i < level; i++) network_backward(network + i, step, i);
    }
    rows.write(x_gradient_, block, call_.inputs, call_.x_gradient);
  }

  void write_weight_gradients() const {
    for (int64_t network = 0; network < Networks::count(call_.leaves); network++)
      for (int64_t which = 0; which < call_.depth; which++)
        totals_[network * call_.depth + which].write(networks_.stage(network, which), networks_.gradients(network, which));
  }

 private:
  void forward(const MapRows<kBlock>& rows, int64_t block) {
    rows.read(call_.x, block, call_.inputs, x_);
    int64_t network = 0;
    for (size_t step = 0; step < outputs_.size(); step++) {
      const int64_t level = call_.leaves >> step;
      for (int64_t i = 0; i < level; i++, network++) {
        float* place = outputs_[step] + i * one_;
        stage(network, 0, step == 0 ? x_ + 0 : combined_[step - 1] + i * one_, place);
        for (int64_t which = 1; which < call_.depth; which++) stage(network, which, place, place);
      }
      for (int64_t i = 0; i < level / 2; i++)
        combine<kBlock>(outputs_[step] + 2 * i * one_, outputs_[step] + (2 * i + 1) * one_, call_.size,
                combined_[step] + i * one_);
    }
  }

  // The inputs may lie where the outputs go.
  void stage(int64_t network, int64_t which, const float* inputs, float* outputs) {
    const Stage stage = networks_.stage(network, which);
    Tape& tape = tapes_[network * call_.depth + which];
    standardize<kBlock>(inputs, stage.width, tape.standard, tape.inverse_deviation);
    scale_and_shift<kBlock>(stage, tape.standard, normed_);
    transpose(normed_, stage.width, tape.normed_rows, tape.row);
    for (int64_t first = 0; first < stage.hidden; first += kHidden) {
      const int64_t count = std::min(kHidden, stage.hidden - first);
      float *before = tape.before + first * kBlock, *gate = tape.gate + first * kBlock;
      product(call_.precision, count, kBlock, stage.width, {stage.up + first * stage.width, stage.width, 1}, {normed_, kBlock},
              {before, kBlock}, false);
      with_activation(call_, [&](auto activation) {
        for (int64_t i = 0; i < count * kBlock; i += kLanes) {
          const Vector x = load(before + i), by = activation.gate(x);
          store(gate + i, by);
          store(active_ + i, activation.of(x, by));
        }
      });
      product(call_.precision, stage.size, kBlock, count, {stage.down + first, stage.hidden, 1}, {active_, kBlock}, {outputs, kBlock},
              first > 0);
    }
  }

  void network_backward(int64_t network, size_t step, int64_t place) {
    const float* gradient = gradients_[step] + place * one_;
    for (int64_t which = call_.depth - 1; which > 0; which--, gradient = middle_) {
      stage_backward(network, which, gradient);
      normed_to_inputs(network, which, middle_, false);
    }
    stage_backward(network, 0, gradient);
    if (step == 0) {
      normed_to_inputs(network, 0, x_gradient_, true);
    } else {
      normed_to_inputs(network, 0, gradient_of_combined(step - 1) + place * one_, false);
    }
  }

  // From the gradient of a stage's outputs to those of its weights and of its normed inputs (in normed_gradient_).
  void stage_backward(int64_t network, int64_t which, const float* gradient) {
    const Stage stage = networks_.stage(network, which);
    const Tape& tape = tapes_[network * call_.depth + which];
    Totals& totals = totals_[network * call_.depth + which];
    transpose(gradient, stage.size, rows_, totals.size_row);
    for (int64_t first = 0; first < stage.hidden; first += kHidden) {
      const int64_t count = std::min(kHidden, stage.hidden - first);
      const float *before = tape.before + first * kBlock, *gate = tape.gate + first * kBlock;
      with_activation(call_, [&](auto activation) {
        for (int64_t i = 0; i < count * kBlock; i += kLanes)
          store(active_ + i, activation.of(load(before + i), load(gate + i)));
      });
      product(call_.precision, count, totals.size_row, kBlock, {active_, kBlock, 1}, {rows_, totals.size_row},
              {totals.down + first * totals.size_row, totals.size_row}, true);
      product(call_.precision, count, kBlock, stage.size, {stage.down + first, 1, stage.hidden}, {gradient, kBlock},
              {active_gradient_, kBlock}, false);
      with_activation(call_, [&](auto activation) {
        for (int64_t i = 0; i < count * kBlock; i += kLanes)
          store(active_gradient_ + i, load(active_gradient_ + i) * activation.slope(load(before + i), load(gate + i)));
      });
      product(call_.precision, count, tape.row, kBlock, {active_gradient_, kBlock, 1}, {tape.normed_rows, tape.row},
              {totals.up + first * tape.row, tape.row}, true);
      product(call_.precision, stage.width, kBlock, count, {stage.up + first * stage.width, 1, stage.width}, {active_gradient_, kBlock},
              {normed_gradient_, kBlock}, first > 0);
    }
  }

  // Through the norm of a stage, with the gradients of its scale and bias.
  void normed_to_inputs(int64_t network, int64_t which, float* to, bool add) {
    const Stage stage = networks_.stage(network, which);
    const Tape& tape = tapes_[network * call_.depth + which];
    Totals& totals = totals_[network * call_.depth + which];
    const float width = static_cast<float>(stage.width);
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      Vector mean{}, along{};
      for (int64_t i = 0; i < stage.width; i++) {
        const Vector g = load(normed_gradient_ + i * kBlock + t), standard = load(tape.standard + i * kBlock + t);
        store(totals.scale + i * kLanes, load(totals.scale + i * kLanes) + g * standard);
        store(totals.bias + i * kLanes, load(totals.bias + i * kLanes) + g);
        mean += g * stage.scale[i];
        along += g * stage.scale[i] * standard;
      }
      const Vector inverse = load(tape.inverse_deviation + t);
      for (int64_t i = 0; i < stage.width; i++) {
        const Vector g = load(normed_gradient_ + i * kBlock + t), standard = load(tape.standard + i * kBlock + t);
        const Vector found = (g * stage.scale[i] - mean / width - standard * (along / width)) * inverse;
        store(to + i * kBlock + t, add ? found + load(to + i * kBlock + t) : found);
      }
    }
  }

  // Gradients of the outputs of a level from those of the combined pairs, which are in the front half of the same place.
  void combine_backward(size_t step, int64_t pairs) {
    const float* combined = combined_[step];
    for (int64_t i = pairs - 1; i >= 0; i--) {  // from the last, whose place no other gradient is in
      const float *left = outputs_[step] + 2 * i * one_, *right = left + one_;
      float *from = gradient_of_combined(step) + i * one_, *to = gradients_[step] + 2 * i * one_;
      for (int64_t j = 0; j < one_; j += kLanes) {
        const Vector y = load(combined + i * one_ + j);
        const Vector g = load(from + j) * (1.0f - y * y / static_cast<float>(call_.size));
        const Vector of_left = g * load(right + j), of_right = g * load(left + j);
        store(to + j, of_left);
        store(to + one_ + j, of_right);
      }
    }
  }

  float* gradient_of_combined(size_t step) { return gradients_[step]; }

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
