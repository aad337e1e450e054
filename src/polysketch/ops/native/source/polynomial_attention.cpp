// Exact polynomial attention, forward: sums over blocks of keys one after another. Weights are never negative, and no
// largest score is needed.
#include "polynomial_attention.h"

namespace {

template <class Weights>
class Forward {
 public:
  Forward(const PolynomialAttentionCall& call, Weights weights, int64_t head, int64_t number, int64_t spans)
      : call_(call), weights_(weights), span_(call, head, number, spans), keys_(span_, call.key, call.width),
        values_(span_, call.value, call.value_width), row_(values_.row), query_(call.width * kQueries),
        scores_(kKeys * kQueries), sums_(kQueries * row_) {}

  void run() {
    for (int64_t query = span_.queries.first; query < span_.queries.last; query += kQueries) {
      const Range seen = span_.seen_by(query);
      keys_.move_to(seen);
      values_.move_to(seen);
      for (int64_t shared = 0; shared < span_.shared; shared++) block(shared, query, seen);
    }
  }

 private:
  void block(int64_t shared, int64_t query, Range seen) {
    const int64_t count = std::min(kQueries, call_.queries - query);
    read_columns(span_.of_query(call_.query, shared, query), count, call_.width, query_, kQueries);
    for (int64_t i = 0; i < call_.width * kQueries; i += kLanes) store(query_ + i, load(query_ + i) * call_.scale);
    zero(sums_, kQueries * row_);
    std::fill(mass_, mass_ + kQueries, call_.offset);
    for (int64_t key = seen.first; key < seen.last; key += kKeys)
      through(query, {key, std::min(key + kKeys, seen.last)});
    write(shared, query, count);
  }

  // Adds values of some keys times their weights.
  void through(int64_t query, Range range) {
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      product(keys.count(), queries.count(), call_.width, {keys_.at(keys.first), keys_.row, 1},
              {query_ + queries.first, kQueries}, {scores(range, keys, queries), kQueries}, false);
    });
    for (int64_t i = 0; i < range.count() * kQueries; i += kLanes) store(scores_ + i, weights_.of(load(scores_ + i)));
    hide(span_, query, range.first, range.count(), scores_, 0.0f);
    for (int64_t v = 0; v < kQueries; v += kLanes) {
      Vector sum{};
      for (int64_t j = 0; j < range.count(); j++) sum += load(scores_ + j * kQueries + v);
      store(mass_ + v, load(mass_ + v) + sum);
    }
    span_.for_parts(query, range, [&](Range keys, Range queries) {
      product(queries.count(), row_, keys.count(), {scores(range, keys, queries), 1, kQueries},
              {values_.at(keys.first), row_}, {sums_ + queries.first * row_, row_}, true);
    });
  }

  float* scores(Range range, Range keys, Range queries) {
    return scores_ + (keys.first - range.first) * kQueries + queries.first;
  }

  void write(int64_t shared, int64_t query, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const float factor = reciprocal_denominator(mass_[t]);
      const float* from = sums_ + t * row_;
      float* to = span_.of_query(call_.output, shared, query + t).data;
      for (int64_t i = 0; i < call_.value_width; i++) to[i] = from[i] * factor;
      *span_.of_query(call_.denominator, shared, query + t).data = mass_[t];
    }
  }

  const PolynomialAttentionCall& call_;
  Weights weights_;
  Span span_;
  MovingTokens keys_, values_;
  int64_t row_;
  Buffer query_, scores_, sums_;  // [width][kQueries], [key][kQueries], [query][row]
  float mass_[kQueries];
};

}  // namespace

// The units first..last, counted over key heads and batch: each is two spans of queries, as far from the begin as from
// the end, so that units are alike where later queries see more keys. Returns 0, or 1 where memory ran out.
extern "C" int polynomial_attention_forward(const PolynomialAttentionCall* call, int64_t first, int64_t last) {
  try {
    with_weights(*call, nullptr, [&](auto weights) {
      for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / call->spans, number = unit % call->spans, spans = 2 * call->spans;
        Forward(*call, weights, head, number, spans).run();
        Forward(*call, weights, head, spans - 1 - number, spans).run();
      }
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
