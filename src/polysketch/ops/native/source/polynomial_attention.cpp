// Exact polynomial attention, forward: sums over blocks of keys one after another. Weights are never negative, and no
// largest score is needed.
#include <vector>

#include "polynomial_attention.h"

namespace {

constexpr int64_t kBlocks = 8;  // of queries, that go through the keys together

// What is kept of a block of queries while it goes through the keys.
struct Block {
  Block(int64_t width, int64_t row) : query(width * kQueries), sums(kQueries * row) {}

  Buffer query, sums;  // [width][kQueries], [query][row]
  float mass[kQueries];
};

template <class Weights>
class Forward {
 public:
  Forward(const PolynomialAttentionCall& call, Weights weights, int64_t head, int64_t number, int64_t spans)
      : call_(call), weights_(weights), span_(call, head, number, spans), keys_(span_, call.key, call.width),
        values_(span_, call.value, call.value_width), row_(values_.row), scores_(kKeys * kQueries) {
    const int64_t blocks = (span_.queries.count() + kQueries - 1) / kQueries;
    for (int64_t i = 0; i < std::min(kBlocks, blocks); i++) blocks_.emplace_back(call.width, row_);
  }

  void run() {
    const Range all = span_.queries;
    for (int64_t first = all.first; first < all.last; first += kBlocks * kQueries) {
      const Range queries{first, std::min(first + kBlocks * kQueries, all.last)};
      const Range seen{0, span_.seen_by((queries.last - 1) / kQueries * kQueries).last};
      keys_.move_to(seen);
      values_.move_to(seen);
      for (int64_t shared = 0; shared < span_.shared; shared++) together(shared, queries, seen);
    }
  }

 private:
  // Some blocks of queries, all of them with some keys before others: many keys do not stay in cache.
  void together(int64_t shared, Range queries, Range seen) {
    const auto each = [&](auto work) {
      for (int64_t query = queries.first; query < queries.last; query += kQueries)
        work(blocks_[(query - queries.first) / kQueries], query, std::min(kQueries, call_.queries - query));
    };
    each([&](Block& block, int64_t query, int64_t count) { start(block, shared, query, count); });
    for (int64_t key = seen.first; key < seen.last; key += kKeys)
      each([&](Block& block, int64_t query, int64_t) {
        const Range keys = Range{key, key + kKeys}.within(span_.seen_by(query));
        if (keys.count()) through(block, query, keys);
      });
    each([&](Block& block, int64_t query, int64_t count) { write(block, shared, query, count); });
  }

  void start(Block& block, int64_t shared, int64_t query, int64_t count) {
    read_columns(span_.of_query(call_.query, shared, query), count, call_.width, block.query, kQueries);
    for (int64_t i = 0; i < call_.width * kQueries; i += kLanes)
      store(block.query + i, load(block.query + i) * call_.scale);
    zero(block.sums, kQueries * row_);
    std::fill(block.mass, block.mass + kQueries, call_.offset);
  }

  // Adds values of some keys times their weights.
  void through(Block& block, int64_t query, Range range) {
    score(span_, query, range, keys_, call_.width, block.query, scores_);
    for (int64_t i = 0; i < range.count() * kQueries; i += kLanes) store(scores_ + i, weights_.of(load(scores_ + i)));
    hide(span_, query, range.first, range.count(), scores_, 0.0f);
    for (int64_t v = 0; v < kQueries; v += kLanes) {
      Vector sum{};
      for (int64_t j = 0; j < range.count(); j++) sum += load(scores_ + j * kQueries + v);
      store(block.mass + v, load(block.mass + v) + sum);
    }
    add_rows(span_, query, range, values_, scores_, block.sums);
  }

  void write(const Block& block, int64_t shared, int64_t query, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const float factor = reciprocal_denominator(block.mass[t]);
      const float* from = block.sums + t * row_;
      float* to = span_.of_query(call_.output, shared, query + t).data;
      for (int64_t i = 0; i < call_.value_width; i++) to[i] = from[i] * factor;
      *span_.of_query(call_.denominator, shared, query + t).data = block.mass[t];
    }
  }

  const PolynomialAttentionCall& call_;
  Weights weights_;
  Span span_;
  MovingTokens keys_, values_;
  int64_t row_;
  Buffer scores_;  // [key][kQueries]
  std::vector<Block> blocks_;
};

}  // namespace

// The units first..last, counted over key heads and batch: each is two spans of queries, as far from the begin as from
// the end, so that units are alike where later queries see more keys. Returns 0, or 1 where memory ran out.
extern "C" int polynomial_attention_forward(const PolynomialAttentionCall* call, int64_t first, int64_t last) {
  try {
    with_weights(*call, nullptr, [&](auto weights) {
      for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / call->spans, number = unit % call->spans;
        const int64_t spans = call->queries > kQueries ? 2 * call->spans : 1;  // one block is not halved
        if (number < spans) Forward(*call, weights, head, number, spans).run();
        if (spans > 1) Forward(*call, weights, head, spans - 1 - number, spans).run();
      }
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
