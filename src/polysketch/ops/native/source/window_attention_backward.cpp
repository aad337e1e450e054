// The gradient of softmax attention within a window, from the peak and the mass of each query.
#include "pairs_backward.h"
#include "window_attention.h"

namespace {

class Softmax {
 public:
  explicit Softmax(const WindowAttentionCall& call) : call_(call) {}

  void read(const Span& span, int64_t shared, int64_t query, int64_t count, float* of_query, float* of_gradient) {
    std::fill(of_query, of_query + kQueries, call_.scale);
    std::fill(of_gradient, of_gradient + kQueries, 1.0f);
    zero(peak_, kQueries);
    zero(share_, kQueries);
    zero(mean_, kQueries);
    for (int64_t t = 0; t < count; t++) {
      peak_[t] = *span.of_query(call_.peak, shared, query + t).data;
      share_[t] = *span.of_query(call_.mass, shared, query + t).data;
      mean_[t] = dot(span.of_query(call_.output_gradient, shared, query + t).data,
                     span.of_query(call_.output, shared, query + t).data, call_.value_width);
    }
    for (int64_t v = 0; v < kQueries; v += kLanes) store(share_ + v, reciprocal_or_zero(load(share_ + v)));
  }

  void weigh(const Span& span, int64_t query, Range range, bool, float* weights, float* changes) {
    hide(span, query, range.first, range.count(), weights, kHidden);
    weigh_gradients(range.count(), peak_, share_, mean_, weights, changes);
  }

  // The key beside.
  void write(const Span& span, int64_t shared, int64_t query, int64_t count, const float* gradients, int64_t row) {
    for (int64_t t = 0; call_.beside_logit && t < count; t++) {
      const float logit = *span.of_query(call_.beside_logit, shared, query + t).data;
      const float* value = span.of_query(call_.beside_value, shared, query + t).data;
      const float* gradient = gradients + t * row;
      float* to = span.of_query(call_.beside_value_gradient, shared, query + t).data;
      const float weight = logit <= kLowest ? 0.0f : std::exp(logit - peak_[t]) * share_[t];
      for (int64_t i = 0; i < call_.value_width; i++) to[i] = weight * gradient[i];
      *span.of_query(call_.beside_logit_gradient, shared, query + t).data =
          weight == 0.0f ? 0.0f : weight * (dot(gradient, value, call_.value_width) - mean_[t]);
    }
  }

 private:
  const WindowAttentionCall& call_;
  float peak_[kQueries], share_[kQueries], mean_[kQueries];  // share: 1 / mass; mean: of the shares' gradients
};

}  // namespace

// The spans first..last, counted over key heads and batch. Returns 0, or 1 where memory ran out.
extern "C" int window_attention_backward(const WindowAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) PairsBackward(*call, Softmax(*call), unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
