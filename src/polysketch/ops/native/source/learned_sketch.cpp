// The learned sketch, forward.
#include "learned_sketch.h"

namespace {

template <int64_t kBlock>
class Forward {
 public:
  explicit Forward(const LearnedSketchCall& call)
      : call_(call), x_(call.inputs * kBlock), normed_(std::max(call.inputs, call.size) * kBlock),
        hidden_(kHidden * kBlock), values_(call.leaves * call.size * kBlock) {}

  void run(const Networks& networks, const MapRows<kBlock>& rows, int64_t block) {
    const int64_t one = call_.size * kBlock;
    rows.read(call_.x, block, call_.inputs, x_);
    int64_t network = 0;
    for (int64_t level = call_.leaves; level >= 2; level /= 2) {
      for (int64_t i = 0; i < level; i++, network++) {
        // The outputs of a level take the places of its inputs: network i needs none but the i-th.
        float* place = values_ + i * one;
        stage(networks.stage(network, 0), level == call_.leaves ? x_ + 0 : place, place);
        for (int64_t which = 1; which < call_.depth; which++) stage(networks.stage(network, which), place, place);
      }
      for (int64_t i = 0; i < level / 2; i++)
        combine<kBlock>(values_ + 2 * i * one, values_ + (2 * i + 1) * one, call_.size, values_ + i * one);
    }
    rows.write(values_, block, call_.size, call_.features);
  }

 private:
  // The inputs may lie where the outputs go.
  void stage(const Stage& stage, const float* inputs, float* outputs) {
    float ignored[kBlock];
    standardize<kBlock>(inputs, stage.width, normed_, ignored);
    scale_and_shift<kBlock>(stage, normed_, normed_);
    for (int64_t first = 0; first < stage.hidden; first += kHidden) {
      const int64_t count = std::min(kHidden, stage.hidden - first);
      product(call_.precision, count, kBlock, stage.width, {stage.up + first * stage.width, stage.width, 1}, {normed_, kBlock},
              {hidden_, kBlock}, false);
      with_activation(call_, [&](auto activation) {
        for (int64_t i = 0; i < count * kBlock; i += kLanes) {
          const Vector x = load(hidden_ + i);
          store(hidden_ + i, activation.of(x, activation.gate(x)));
        }
      });
      product(call_.precision, stage.size, kBlock, count, {stage.down + first, stage.hidden, 1}, {hidden_, kBlock}, {outputs, kBlock},
              first > 0);
    }
  }

  const LearnedSketchCall& call_;
  Buffer x_, normed_, hidden_, values_;
};

template <int64_t kBlock>
void run_blocks(const LearnedSketchCall& call, int64_t first, int64_t last) {
  Forward<kBlock> forward(call);
  for_maps<kBlock>(call, first, last, [&](int64_t map, const MapRows<kBlock>& rows, int64_t start, int64_t stop) {
    const Networks networks(call, map);
    for (int64_t block = start; block < stop; block++) forward.run(networks, rows, block);
  });
}

}  // namespace

// The blocks of 32 rows first..last, counted over all maps. Returns 0, or 1 where memory ran out.
extern "C" int learned_sketch_forward(const LearnedSketchCall* call, int64_t first, int64_t last) {
  try {
    if (MapRows<kManyRows>(*call, 0).count() <= kFewRows) {
      run_blocks<kFewRows>(*call, first, last);  // one block a map, of either size
    } else {
      run_blocks<kManyRows>(*call, first, last);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
