// The gradient of exact polynomial attention, from the denominator of each query.
#include "pairs_backward.h"
#include "polynomial_attention.h"

namespace {

template <class Weights>
class Polynomial {
 public:
  Polynomial(const PolynomialAttentionCall& call, Weights weights) : call_(call), weights_(weights) {}

  void read(const Span& span, int64_t shared, int64_t query, int64_t count, float* of_query, float* of_gradient) {
    for (int64_t t = 0; t < kQueries; t++) {
      const float denominator = t < count ? *span.of_query(call_.denominator, shared, query + t).data : 0.0f;
      weights_.read(t, denominator, of_query[t], of_gradient[t]);
      of_query[t] *= call_.scale;
      term_[t] = t < count ? *span.of_query(call_.row_term, shared, query + t).data * of_gradient[t] : 0.0f;
    }
  }

  // Queries behind the last have no part in the sums.
  void weigh(const Span& span, int64_t query, Range range, bool own, float* weights, float* changes) {
    const int64_t last = call_.queries - query > kHalf ? kQueries : kHalf;
    for (int64_t v = 0; v < last; v += kLanes)
      for (int64_t i = v; i < range.count() * kQueries; i += kQueries)
        store(changes + i, load(changes + i) - load(term_ + v));
    hide(span, query, range.first, range.count(), weights, 0.0f);
    hide(span, query, range.first, range.count(), changes, 0.0f);
    for (int64_t v = 0; v < last; v += kLanes)
      for (int64_t i = v; i < range.count() * kQueries; i += kQueries)
        weights_.weigh(v, weights + i, changes + i, own);
    if (!Weights::kZeroOfZero) hide(span, query, range.first, range.count(), weights, 0.0f);
  }

  void write(const Span&, int64_t, int64_t, int64_t, const float*, int64_t) {}

 private:
  const PolynomialAttentionCall& call_;
  Weights weights_;
  float term_[kQueries];
};

}  // namespace

// The spans first..last, counted over key heads and batch. Returns 0, or 1 where memory ran out.
extern "C" int polynomial_attention_backward(const PolynomialAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++)
      with_weights(*call, call->moments ? call->moments + unit * call->terms : nullptr,
                   [&](auto weights) { PairsBackward(*call, Polynomial(*call, weights), unit).run(); });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
