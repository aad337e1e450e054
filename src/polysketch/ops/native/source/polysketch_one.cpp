// Decoding with a window and sums under the delta rule: one token of every row, from projections to the output.
//
// The token takes the slot of the oldest one of its row's ring. That one is written into the sums, which then answer the
// queries, and the answer stands beside the window as one more key. Plain PyTorch has more than a hundred operations for
// it, each of which takes longer to begin than to do.
#include "polysketch_one.h"

#include "half.h"
#include "linear_attention_extend.h"
#include "window_attention.h"

#include <limits>
#include <type_traits>

namespace {

constexpr float kEpsilon = 1e-6f;     // of unit_scale.py and sketch_products.py
constexpr float kShortest = 1e-12f;   // of torch.nn.functional.normalize
constexpr int64_t kNumberSizes[] = {4, 2, 2};  // of ExtendCall::kind

float over_root_mean_square(const float* x, int64_t width) {
  return 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + kEpsilon);
}

// One row of heads, each `width` numbers behind the other; which head or token is asked for does not matter elsewhere.
Tensor heads_of(float* data, int64_t width) { return {data, 0, width, width}; }

// What a ring or a state has of one key head of a row.
Tensor part_of(const Tensor& x, int64_t row, int64_t head, int64_t number_size = sizeof(float)) {
  char* data = reinterpret_cast<char*>(x.data) + (row * x.batch + head * x.head) * number_size;
  return {reinterpret_cast<float*>(data), 0, 0, x.token};
}

// One key head of one row of the batch, with the queries that share it; its ring is kept as `Kept`.
template <class Kept>
class OneToken {
 public:
  OneToken(const PolysketchOneCall& call, int64_t unit)
      : call_(call), batch_(unit / call.key_heads), head_(unit % call.key_heads),
        ring_row_(call.ring_rows ? call.ring_rows[batch_] : batch_), shared_(call.heads / call.key_heads),
        features_(2 * call.sketch_size), answer_width_(call.value_width + 1), slot_(call.position[batch_] % call.window),
        queries_(shared_ * call.width), query_features_(shared_ * features_), left_(features_ + 1),
        leaving_(answer_width_), answers_(shared_ * answer_width_), logits_(shared_), spare_(2 * shared_),
        new_key_(call.width + features_ + 1) {}

  bool run() {
    take_slot();
    for (int64_t query = 0; query < shared_; query++) read_query(query);
    if (!recall()) return false;
    for (int64_t query = 0; query < shared_; query++) logits_[query] = logit_of(answers_ + query * answer_width_);
    return attend();
  }

 private:
  // What leaves the window is kept apart, and the token stands in its place.
  void take_slot() {
    Kept *key = slot_of(call_.ring_key, slot_), *value = slot_of(call_.ring_value, slot_);
    const float *given = call_.key.at(batch_, head_, 0), *hidden = call_.hidden.at(batch_, 0, 0);
    convert(key + call_.width, left_ + 0, features_ + 1);
    convert(value, leaving_ + 0, call_.value_width);
    leaving_[call_.value_width] = 1.0f;
    const float by = call_.normed ? over_root_mean_square(given, call_.width) : 1.0f;
    for (int64_t i = 0; i < call_.width; i++) new_key_[i] = given[i] * by;
    sketch(call_.sketched_key.at(batch_, head_, 0), new_key_ + call_.width);
    const float logit = call_.strength.of(hidden, call_.hidden_size, head_);
    new_key_[call_.width + features_] = 1.0f / (1.0f + std::exp(-logit));
    convert(new_key_ + 0, key, call_.width + features_ + 1);
    convert(call_.value.at(batch_, head_, 0), value, call_.value_width);
    // Threads of other heads write the same.
    __atomic_store_n(call_.real + ring_row_ * call_.real_row + slot_, uint8_t{1}, __ATOMIC_RELAXED);
  }

  void read_query(int64_t query) {
    const int64_t head = head_ * shared_ + query;
    const float* given = call_.query.at(batch_, head, 0);
    const float by = std::exp(call_.log_scale[head_]) * (call_.normed ? over_root_mean_square(given, call_.width) : 1.0f);
    for (int64_t i = 0; i < call_.width; i++) queries_[query * call_.width + i] = given[i] * by;
    sketch(call_.sketched_query.at(batch_, head, 0), query_features_ + query * features_);
  }

  // Two sketches of unit length, of a vector with a root mean square of one.
  void sketch(const float* x, float* to) const {
    const int64_t width = call_.sketched_width, size = call_.sketch_size;
    const float* weight = call_.sketches + head_ * width * features_;
    const float by = over_root_mean_square(x, width) / std::sqrt(static_cast<float>(width));
    zero(to, features_);
    for (int64_t i = 0; i < width; i++) add_scaled(x[i] * by, weight + i * features_, to, features_);
    for (float* half : {to, to + size}) {
      const float length = std::sqrt(dot(half, half, size));
      for (int64_t i = 0; i < size; i++) half[i] /= std::max(length, kShortest);
    }
  }

  // What left the window is written; then every query is answered, and how sure the answer is stands behind it.
  bool recall() {
    const int64_t row = call_.sums_rows ? call_.sums_rows[batch_] : batch_;
    ExtendCall call{};
    call.heads = shared_;
    call.key_heads = call.power = 1;
    call.factors = 2;
    call.features = features_;
    call.value_width = answer_width_;
    call.expanded = call_.sketch_size * call_.sketch_size;
    call.kind = call_.kind;
    call.query = heads_of(query_features_, features_);
    call.key = heads_of(left_, features_);
    call.value = heads_of(leaving_, answer_width_);
    call.strength = heads_of(left_ + features_, 1);
    call.output = heads_of(answers_, answer_width_);
    call.denominator = heads_of(spare_, 1);
    call.sums = part_of(call_.sums, row, head_, kNumberSizes[call_.kind]);
    call.normalizer = part_of(call_.normalizer, row, head_);
    call.log_decay_total = part_of(call_.log_decay_total, row, head_);
    return linear_attention_extend(&call, 0, 1) == 0;
  }

  // Of the key beside the window; nothing where nothing was written.
  float logit_of(const float* answer) const {
    const float confidence = answer[call_.value_width];
    if (confidence == 0.0f || call_.removed) return -std::numeric_limits<float>::infinity();
    const float own = call_.far.of(call_.hidden.at(batch_, 0, 0), call_.hidden_size, head_);
    return call_.confidence_scale[head_] * confidence + own;
  }

  bool attend() {
    WindowAttentionCall call{};
    call.heads = shared_;
    call.key_heads = call.queries = call.spans = 1;
    call.keys = call_.window;
    call.behind = call_.window - 1;
    call.width = call_.width;
    call.value_width = call_.value_width;
    call.scale = 1.0f / std::sqrt(static_cast<float>(call_.width));
    call.query = heads_of(queries_, call_.width);
    call.key = in_float32(call_.ring_key, call_.width, keys_);
    call.value = in_float32(call_.ring_value, call_.value_width, values_);
    call.key_mask = call_.real + ring_row_ * call_.real_row;
    call.beside_logit = heads_of(logits_, 1);
    call.beside_value = heads_of(answers_, answer_width_);
    call.output = {call_.output.at(batch_, head_ * shared_, 0), 0, call_.output.head, call_.output.token};
    call.peak = heads_of(spare_, 1);
    call.mass = heads_of(spare_ + shared_, 1);
    return window_attention_one(&call, 0, 1) == 0;
  }

  // The first `width` numbers of every slot: where they lie, or in `copy`.
  Tensor in_float32(const Tensor& ring, int64_t width, Buffer& copy) const {
    if constexpr (std::is_same_v<Kept, float>) return part_of(ring, ring_row_, head_);
    copy = Buffer(call_.window * width);
    for (int64_t slot = 0; slot < call_.window; slot++) convert(slot_of(ring, slot), copy + slot * width, width);
    return {copy, 0, 0, width};
  }

  // Strides count numbers, of whatever size.
  Kept* slot_of(const Tensor& ring, int64_t slot) const {
    return reinterpret_cast<Kept*>(ring.data) + ring_row_ * ring.batch + head_ * ring.head + slot * ring.token;
  }

  const PolysketchOneCall& call_;
  int64_t batch_, head_, ring_row_, shared_, features_, answer_width_, slot_;
  Buffer queries_, query_features_, left_, leaving_, answers_, logits_, spare_, new_key_, keys_, values_;
};

template <class Kept>
int for_units(const PolysketchOneCall& call, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; unit++)
    if (!OneToken<Kept>(call, unit).run()) return 1;
  return 0;
}

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int polysketch_one(const PolysketchOneCall* call, int64_t first, int64_t last) {
  try {
    if (call->ring_kind == 0) return for_units<float>(*call, first, last);
    if (call->ring_kind == 1) return for_units<Bfloat16>(*call, first, last);
    return for_units<Float16>(*call, first, last);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
