// The gradient of exact attention, whatever its weights: they are made again from the scores, and from what forward kept
// of each query. A span adds up the gradients of its own keys and values, also through queries of its neighbours: their
// weights are computed twice, and no sum is shared by two threads.
#pragma once

#include "seen_pairs.h"

// A call of `Call` has tensors output_gradient, query_gradient, key_gradient and value_gradient. A kind of weights has
//
//   read(span, shared, query, count, of_query, of_gradient): for a block of queries, factors on each and on the gradient
//     of its output, zero or finite for those behind `count`;
//   weigh(span, query, keys, own, weights, changes): scores -> weights, and products of gradients and values -> gradients
//     of the scores, [key][kQueries], zero where a pair is not seen, whatever stands there; `own` if the span owns the
//     queries, so that no other meets these pairs as its own;
//   write(span, shared, query, count, gradients, row): the rest, with the gradients of outputs times their factors.
template <class Call, class Kind>
class PairsBackward {
 public:
  PairsBackward(const Call& call, Kind kind, int64_t unit)
      : call_(call), kind_(kind), span_(call, unit), keys_(span_, call.key, call.width),
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

  // Queries and gradients of outputs times their factors, as rows and as columns.
  void read(int64_t shared, int64_t query, int64_t count) {
    float of_gradient[kQueries];
    kind_.read(span_, shared, query, count, of_query_, of_gradient);
    zero(query_rows_ + count * row_, (kQueries - count) * row_);
    zero(gradient_rows_ + count * value_row_, (kQueries - count) * value_row_);
    read_rows(span_.of_query(call_.query, shared, query), count, call_.width, query_rows_, row_, of_query_);
    read_rows(span_.of_query(call_.output_gradient, shared, query), count, call_.value_width, gradient_rows_, value_row_,
              of_gradient);
    read_columns({query_rows_, row_}, kQueries, call_.width, query_columns_, kQueries);
    read_columns({gradient_rows_, value_row_}, kQueries, call_.value_width, gradient_columns_, kQueries);
  }

  // Adds the gradients through the weights of some keys.
  void through(int64_t query, Range range, bool own) {
    const auto place = [&](Range keys, Range queries) { return (keys.first - range.first) * kQueries + queries.first; };
    score(span_, query, range, keys_, call_.width, query_columns_, weights_);
    score(span_, query, range, values_, call_.value_width, gradient_columns_, changes_);
    kind_.weigh(span_, query, range, own, weights_, changes_);
    if (own) add_rows(span_, query, range, keys_, changes_, query_gradient_);
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      keys = keys.within(span_.owned);
      to_sums(keys, queries, place(keys, queries));
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
    for (int64_t t = 0; t < count; t++)
      for (int64_t i = 0; i < row_; i++) query_gradient_[t * row_ + i] *= of_query_[t];
    write_rows(query_gradient_, row_, count, call_.width, span_.of_query(call_.query_gradient, shared, query), false);
    kind_.write(span_, shared, query, count, gradient_rows_, value_row_);
  }

  const Call& call_;
  Kind kind_;
  Span span_;
  MovingTokens keys_, values_;
  MovingSums key_sums_, value_sums_;
  int64_t row_, value_row_;
  Buffer query_columns_, query_rows_, gradient_columns_, gradient_rows_, weights_, changes_, query_gradient_;
  float of_query_[kQueries];
};
