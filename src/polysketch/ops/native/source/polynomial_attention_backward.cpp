// The gradient of exact polynomial attention. Weights are made again from the scores and the denominator of each query.
// A span adds up the gradients of its own keys and values, also through queries of later spans: their weights are
// computed twice, and no sum is shared by two threads.
#include "polynomial_attention.h"

namespace {

template <class Weights>
class Backward {
 public:
  Backward(const PolynomialAttentionCall& call, Weights weights, int64_t unit)
      : call_(call), weights_of_(weights), span_(call, unit), keys_(span_, call.key, call.width),
        values_(span_, call.value, call.value_width), key_sums_(span_, call.key_gradient, call.width),
        value_sums_(span_, call.value_gradient, call.value_width), row_(keys_.row), value_row_(values_.row),
        query_columns_(call.width * kQueries), query_rows_(kQueries * row_),
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

  // Queries and gradients of outputs times their factors, as rows and as columns; and each query's term.
  void read(int64_t shared, int64_t query, int64_t count) {
    float of_gradient[kQueries];
    zero(query_rows_ + count * row_, (kQueries - count) * row_);
    zero(gradient_rows_ + count * value_row_, (kQueries - count) * value_row_);
    for (int64_t t = 0; t < kQueries; t++) {
      const float denominator = t < count ? *span_.of_query(call_.denominator, shared, query + t).data : 0.0f;
      weights_of_.read(t, denominator, factor_[t], of_gradient[t]);
      factor_[t] *= call_.scale;
      term_[t] = t < count ? *span_.of_query(call_.row_term, shared, query + t).data * of_gradient[t] : 0.0f;
    }
    read_rows(span_.of_query(call_.query, shared, query), count, call_.width, query_rows_, row_, factor_);
    read_rows(span_.of_query(call_.output_gradient, shared, query), count, call_.value_width, gradient_rows_, value_row_,
              of_gradient);
    read_columns({query_rows_, row_}, kQueries, call_.width, query_columns_, kQueries);
    read_columns({gradient_rows_, value_row_}, kQueries, call_.value_width, gradient_columns_, kQueries);
  }

  // Adds the gradients through the weights of some keys.
  void through(int64_t query, Range range, bool own) {
    const auto place = [&](Range keys, Range queries) { return (keys.first - range.first) * kQueries + queries.first; };
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      product(keys.count(), queries.count(), call_.width, {keys_.at(keys.first), row_, 1},
              {query_columns_ + queries.first, kQueries}, {weights_ + place(keys, queries), kQueries}, false);
      product(keys.count(), queries.count(), call_.value_width, {values_.at(keys.first), value_row_, 1},
              {gradient_columns_ + queries.first, kQueries}, {changes_ + place(keys, queries), kQueries}, false);
    });
    weigh(query, range, own);
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      if (own)
        product(queries.count(), row_, keys.count(), {changes_ + place(keys, queries), 1, kQueries},
                {keys_.at(keys.first), row_}, {query_gradient_ + queries.first * row_, row_}, true);
      to_sums(keys.within(span_.owned), queries, place(keys.within(span_.owned), queries));
    });
  }

  // Scores and products of gradients and values -> weights, and gradients of the scores. What is not seen, or was not
  // computed, counts nothing.
  void weigh(int64_t query, Range range, bool own) {
    const int64_t last = call_.queries - query > kHalf ? kQueries : kHalf;
    for (int64_t v = 0; v < last; v += kLanes)
      for (int64_t i = v; i < range.count() * kQueries; i += kQueries)
        store(changes_ + i, load(changes_ + i) - load(term_ + v));
    hide(span_, query, range.first, range.count(), weights_, 0.0f);
    hide(span_, query, range.first, range.count(), changes_, 0.0f);
    for (int64_t v = 0; v < last; v += kLanes)
      for (int64_t i = v; i < range.count() * kQueries; i += kQueries)
        weights_of_.weigh(v, weights_ + i, changes_ + i, own);
    if (!Weights::kZeroOfZero) hide(span_, query, range.first, range.count(), weights_, 0.0f);
  }

  void to_sums(Range keys, Range queries, int64_t place) {
    if (!keys.count()) return;
    product(keys.count(), value_row_, queries.count(), {weights_ + place, kQueries, 1},
            {gradient_rows_ + queries.first * value_row_, value_row_}, {value_sums_.at(keys.first), value_row_}, true);
    product(keys.count(), row_, queries.count(), {changes_ + place, kQueries, 1},
            {query_rows_ + queries.first * row_, row_}, {key_sums_.at(keys.first), row_}, true);
  }

  void write(int64_t shared, int64_t query, int64_t count) {
    for (int64_t t = 0; t < count; t++)
      for (int64_t i = 0; i < row_; i++) query_gradient_[t * row_ + i] *= factor_[t];
    write_rows(query_gradient_, row_, count, call_.width, span_.of_query(call_.query_gradient, shared, query), false);
  }

  const PolynomialAttentionCall& call_;
  Weights weights_of_;
  Span span_;
  MovingTokens keys_, values_;
  MovingSums key_sums_, value_sums_;
  int64_t row_, value_row_;
  Buffer query_columns_, query_rows_, gradient_columns_, gradient_rows_, weights_, changes_, query_gradient_;
  float factor_[kQueries], term_[kQueries];
};

}  // namespace

// The spans first..last, counted over key heads and batch. Returns 0, or 1 where memory ran out.
extern "C" int polynomial_attention_backward(const PolynomialAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++)
      with_weights(*call, call->moments ? call->moments + unit * call->terms : nullptr,
                   [&](auto weights) { Backward(*call, weights, unit).run(); });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
