// Softmax attention of one query a head, which stands at the last key: a step of decoding. Keys and values are read once,
// where they lie; a block of queries would be worked on for one of them.
#include "window_attention.h"

namespace {

class One {
 public:
  One(const WindowAttentionCall& call, int64_t unit)
      : call_(call), span_(call, unit), seen_{std::max<int64_t>(call.keys - 1 - call.behind, 0), call.keys},
        query_(call.width), weights_(padded(seen_.count())), output_(call.value_width) {}

  void run() {
    for (int64_t shared = 0; shared < span_.shared; shared++) {
      score(span_.of_query(call_.query, shared, 0).data);
      const float peak = start(shared);
      const float mass = weigh(peak) + beside_;
      add_values();
      write(shared, peak, mass);
    }
  }

 private:
  void score(const float* query) {
    const WindowAttentionCall& call = call_;
    for (int64_t i = 0; i < call.width; i++) query_[i] = query[i] * call.scale;
    std::fill(weights_ + seen_.count(), weights_ + padded(seen_.count()), kHidden);
    for (int64_t key = seen_.first; key < seen_.last; key++)
      weights_[key - seen_.first] =
          span_.is_real(key) ? dot(query_, span_.of_key(call.key, key).data, call.width) : kHidden;
  }

  // The largest score; the output begins as the value of the key beside, times its weight.
  float start(int64_t shared) {
    const WindowAttentionCall& call = call_;
    const float logit = call.beside_logit ? *span_.of_query(call.beside_logit, shared, 0).data : kHidden;
    const bool is_beside = !(logit <= kLowest);  // also a NaN
    Vector most = splat(is_beside ? logit : kLowest);
    for (int64_t j = 0; j < seen_.count(); j += kLanes) most = larger(most, load(weights_ + j));
    for (int lane = 1; lane < kLanes; lane++)
      if (most[lane] > most[0] || most[lane] != most[lane]) most[0] = most[lane];
    const float peak = most[0];
    beside_ = is_beside ? weight_of(splat(logit - peak))[0] : 0.0f;
    zero(output_, call.value_width);
    if (is_beside) add_scaled(beside_, span_.of_query(call.beside_value, shared, 0).data, output_, call.value_width);
    return peak;
  }

  // Scores -> weights relative to the peak; their sum.
  float weigh(float peak) {
    Vector mass{};
    for (int64_t j = 0; j < seen_.count(); j += kLanes) {
      const Vector weight = weight_of(load(weights_ + j) - peak);
      store(weights_ + j, weight);
      mass += weight;
    }
    return sum_of(mass);
  }

  void add_values() {
    const WindowAttentionCall& call = call_;
    for (int64_t key = seen_.first; key < seen_.last; key++)
      if (span_.is_real(key))
        add_scaled(weights_[key - seen_.first], span_.of_key(call.value, key).data, output_, call.value_width);
  }

  void write(int64_t shared, float peak, float mass) {
    const WindowAttentionCall& call = call_;
    const float by = reciprocal_or_zero(splat(mass))[0];
    float* output = span_.of_query(call.output, shared, 0).data;
    for (int64_t i = 0; i < call.value_width; i++) output[i] = output_[i] * by;
    *span_.of_query(call.peak, shared, 0).data = peak;
    *span_.of_query(call.mass, shared, 0).data = mass;
  }

  const WindowAttentionCall& call_;
  Span span_;
  Range seen_;
  Buffer query_, weights_, output_;
  float beside_ = 0;  // the weight of the key beside
};

}  // namespace

extern "C" int window_attention_one(const WindowAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) One(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
