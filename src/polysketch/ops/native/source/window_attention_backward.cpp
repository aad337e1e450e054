// The gradient of softmax attention within a window. Weights are made again from the scores, the peak and the mass of
// each query. A span adds up the gradients of its own keys and values, also through queries of its neighbours: their
// weights are computed twice, and no sum is shared by two threads.
#include "window_attention.h"

namespace {

class Backward {
 public:
  Backward(const WindowAttentionCall& call, int64_t unit)
      : call_(call), span_(call, unit), keys_(span_, call.key, call.width), values_(span_, call.value, call.value_width),
        key_sums_(span_, call.key_gradient, call.width), value_sums_(span_, call.value_gradient, call.value_width),
        row_(keys_.row), value_row_(values_.row), query_columns_(call.width * kQueries), query_rows_(kQueries * row_),
        gradient_columns_(call.value_width * kQueries), gradient_rows_(kQueries * value_row_),
        weights_(kKeys * kQueries), changes_(kKeys * kQueries), query_gradient_(kQueries * row_) {}

  void run() {
    const Range queries = span_.queries_of_owned();
    for (int64_t query = queries.first; query < queries.last; query += kQueries) {
      const bool own = query >= span_.queries.first && query < span_.queries.last;
      const Range seen = span_.seen_by(query), owned = seen.within(span_.owned);
      if (!own && !owned.count()) continue;
      keys_.move_to(seen);
      values_.move_to(seen);
      key_sums_.move_to(owned);
      value_sums_.move_to(owned);
      for (int64_t shared = 0; shared < span_.shared; shared++) block(shared, query, own ? seen : owned, own);
    }
    key_sums_.finish();
    value_sums_.finish();
  }

 private:
  void block(int64_t shared, int64_t query, Range seen, bool own) {
    const int64_t count = std::min(kQueries, call_.queries - query);
    read(shared, query, count);
    if (own) zero(query_gradient_, kQueries * row_);
    for (int64_t key = seen.first; key < seen.last; key += kKeys)
      through(query, {key, std::min(key + kKeys, seen.last)}, own);
    if (own) write(shared, query, count);
  }

  // Queries times the scale and gradients of outputs, as rows and as columns; and what each query needs besides.
  void read(int64_t shared, int64_t query, int64_t count) {
    const WindowAttentionCall& call = call_;
    const Rows queries = span_.of_query(call.query, shared, query);
    const Rows gradients = span_.of_query(call.output_gradient, shared, query);
    float scales[kQueries];
    std::fill(scales, scales + kQueries, call.scale);
    zero(query_rows_ + count * row_, (kQueries - count) * row_);
    zero(gradient_rows_ + count * value_row_, (kQueries - count) * value_row_);
    read_rows(queries, count, call.width, query_rows_, row_, scales);
    read_rows(gradients, count, call.value_width, gradient_rows_, value_row_);
    read_columns({query_rows_, row_}, kQueries, call.width, query_columns_, kQueries);
    read_columns({gradient_rows_, value_row_}, kQueries, call.value_width, gradient_columns_, kQueries);
    zero(peak_, kQueries);
    zero(share_, kQueries);
    zero(mean_, kQueries);
    for (int64_t t = 0; t < count; t++) {
      peak_[t] = *span_.of_query(call.peak, shared, query + t).data;
      share_[t] = *span_.of_query(call.mass, shared, query + t).data;
      mean_[t] = dot(gradients.at(t), span_.of_query(call.output, shared, query + t).data, call.value_width);
    }
    for (int64_t v = 0; v < kQueries; v += kLanes) store(share_ + v, reciprocal_or_zero(load(share_ + v)));
  }

  // Adds the gradients through the weights of some keys.
  void through(int64_t query, Range range, bool own) {
    const WindowAttentionCall& call = call_;
    const auto place = [&](Range keys, Range queries) { return (keys.first - range.first) * kQueries + queries.first; };
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      product(keys.count(), queries.count(), call.width, {keys_.at(keys.first), row_, 1},
              {query_columns_ + queries.first, kQueries}, {weights_ + place(keys, queries), kQueries}, false);
      product(keys.count(), queries.count(), call.value_width, {values_.at(keys.first), value_row_, 1},
              {gradient_columns_ + queries.first, kQueries}, {changes_ + place(keys, queries), kQueries}, false);
    });
    hide(span_, query, range.first, range.count(), weights_, kHidden);
    weigh_gradients(range.count(), peak_, share_, mean_, weights_, changes_);
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      if (own)
        product(queries.count(), row_, keys.count(), {changes_ + place(keys, queries), 1, kQueries},
                {keys_.at(keys.first), row_}, {query_gradient_ + queries.first * row_, row_}, true);
      to_sums(keys.within(span_.owned), queries, place(keys.within(span_.owned), queries));
    });
  }

  void to_sums(Range keys, Range queries, int64_t place) {
    if (!keys.count()) return;
    product(keys.count(), value_row_, queries.count(), {weights_ + place, kQueries, 1},
            {gradient_rows_ + queries.first * value_row_, value_row_}, {value_sums_.at(keys.first), value_row_}, true);
    product(keys.count(), row_, queries.count(), {changes_ + place, kQueries, 1},
            {query_rows_ + queries.first * row_, row_}, {key_sums_.at(keys.first), row_}, true);
  }

  void write(int64_t shared, int64_t query, int64_t count) {
    const WindowAttentionCall& call = call_;
    for (int64_t i = 0; i < count * row_; i++) query_gradient_[i] *= call.scale;
    write_rows(query_gradient_, row_, count, call.width, span_.of_query(call.query_gradient, shared, query), false);
    for (int64_t t = 0; call.beside_logit && t < count; t++) {
      const float logit = *span_.of_query(call.beside_logit, shared, query + t).data;
      const float* value = span_.of_query(call.beside_value, shared, query + t).data;
      const float* gradient = gradient_rows_ + t * value_row_;
      float* to = span_.of_query(call.beside_value_gradient, shared, query + t).data;
      const float weight = logit <= kLowest ? 0.0f : std::exp(logit - peak_[t]) * share_[t];
      for (int64_t i = 0; i < call.value_width; i++) to[i] = weight * gradient[i];
      *span_.of_query(call.beside_logit_gradient, shared, query + t).data =
          weight == 0.0f ? 0.0f : weight * (dot(gradient, value, call.value_width) - mean_[t]);
    }
  }

  const WindowAttentionCall& call_;
  Span span_;
  MovingTokens keys_, values_;
  MovingSums key_sums_, value_sums_;
  int64_t row_, value_row_;
  Buffer query_columns_, query_rows_, gradient_columns_, gradient_rows_, weights_, changes_, query_gradient_;
  float peak_[kQueries], share_[kQueries], mean_[kQueries];  // share: 1 / mass; mean: of the shares' gradients
};

}  // namespace

// The spans first..last, counted over key heads and batch. Returns 0, or 1 where memory ran out.
extern "C" int window_attention_backward(const WindowAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Backward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
