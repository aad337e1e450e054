// Which pairs of a query and a key are seen, and how a thread goes through them: what exact attention shares, of softmax
// within a window and of polynomials.
//
// The query of number i stands at position i + keys - queries of the keys, and sees those from `behind` before it to
// `ahead` after it, or to the end of its block, which count from the first query. Queries are worked on in blocks;
// scores lie as scores[key][query], so that a vector holds one key's scores of many queries.
#pragma once

#include "memory.h"
#include "product.h"

constexpr int64_t kKeys = 128;  // worked on at once
constexpr int64_t kHalf = kQueries / 2;

// What calls begin with.
struct PairsCall {
  int64_t heads, key_heads, queries, keys, width, value_width;
  int64_t behind, ahead, block, spans;  // block: 0, or tokens of a block, the end of which no query sees beyond
  float scale;
  Tensor query, key, value;
  const uint8_t* key_mask;  // (rows, keys), not zero for a real token, with this stride of rows; null where all are
  int64_t key_mask_row;
  const int64_t* key_rows;  // (batch,): the row of key, value and mask that each has; null for its own
};

// Tokens first..last, the last not included.
struct Range {
  int64_t first, last;
  int64_t count() const { return std::max<int64_t>(last - first, 0); }
  Range within(Range other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
};

// A span of queries of all heads that share one key head. Spans begin at a block of queries, so that what is computed
// for a block does not depend on how many spans there are.
struct Span {
  Span(const PairsCall& call, int64_t unit) : Span(call, unit / call.spans, unit % call.spans, call.spans) {}

  // One of `spans` of a key head, counted over the batch.
  Span(const PairsCall& call, int64_t head, int64_t number, int64_t spans)
      : call(call), batch(head / call.key_heads), key_head(head % call.key_heads), shared(call.heads / call.key_heads),
        key_row(call.key_rows ? call.key_rows[batch] : batch), earlier(call.keys - call.queries) {
    const int64_t tokens = round_up((call.queries + spans - 1) / spans, kQueries);
    queries = {std::min(number * tokens, call.queries), std::min((number + 1) * tokens, call.queries)};
    owned = {number == 0 ? 0 : queries.first + earlier, queries.last + earlier};
    most_keys = std::min(call.behind + call.ahead + kQueries + kTileRows, call.keys);
  }

  // Keys that a block of queries sees, and up to a tile's rows before them, which makes them whole tiles.
  Range seen_by(int64_t query) const {
    const int64_t position = query + earlier, last = std::min(query + kQueries, call.queries) + earlier;
    const Range seen{std::max<int64_t>(position - call.behind, 0), std::min(last + call.ahead, call.keys)};
    return {std::max<int64_t>(seen.last - round_up(seen.count(), kTileRows), 0), seen.last};
  }

  // Queries, in whole blocks, that see any of the span's own keys.
  Range queries_of_owned() const {
    const int64_t first = std::max<int64_t>(queries.first - call.ahead, 0) / kQueries * kQueries;
    return {first, std::min(queries.last + call.behind, call.queries)};
  }

  // Calls work(part of the keys, queries of the block) for parts of `keys`: some are seen by queries of the block's
  // first half alone, and some by those of its second half. Other pairs of the block are left out, and so is a second
  // half beyond the last query. Parts are whole tiles where `keys` is.
  template <class Work>
  void for_parts(int64_t query, Range keys, Work work) const {
    const int64_t position = query + earlier, last = call.queries - query > kHalf ? kQueries : kHalf;
    const int64_t before = std::clamp<int64_t>(position - call.behind + kHalf - keys.first, 0, keys.count());
    const int64_t until = std::clamp<int64_t>(position + call.ahead + kHalf - keys.first, 0, keys.count());
    const int64_t middle = keys.first + before / kTileRows * kTileRows;
    const int64_t behind = std::min(keys.first + round_up(until, kTileRows), keys.last);
    if (keys.first < middle) work(Range{keys.first, middle}, Range{0, kHalf});
    if (middle < behind) work(Range{middle, behind}, Range{0, last});
    if (behind < keys.last && kHalf < last) work(Range{behind, keys.last}, Range{kHalf, last});
  }

  // How far before it a query may stand that sees a key: in blocks, at the begin of the key's own.
  int64_t ahead_of(int64_t key) const {
    return std::min(call.ahead, std::max<int64_t>(key - earlier, 0) % call.block);
  }

  bool is_real(int64_t key) const { return !call.key_mask || call.key_mask[key_row * call.key_mask_row + key]; }
  Rows of_key(const Tensor& x, int64_t token) const { return rows_of(x, key_row, key_head, token); }
  Rows of_query(const Tensor& x, int64_t query_head, int64_t token) const {
    return rows_of(x, batch, key_head * shared + query_head, token);
  }

  const PairsCall& call;
  int64_t batch, key_head, shared, key_row;
  int64_t earlier;  // keys before the first query
  Range queries, owned;
  int64_t most_keys;  // that a block of queries sees
};

// Rows of the tokens in a range that only moves on, in one piece of memory.
class MovingRows {
 public:
  MovingRows(const Span& span, int64_t width)
      : row(padded(width)), capacity_(std::min(2 * span.most_keys, span.call.keys)), rows_(capacity_ * row) {}

  float* at(int64_t token) const { return rows_ + (token - first_) * row; }
  int64_t last() const { return last_; }  // the last not included; 0 before the first move

  // Gives memory to the tokens of `range` that have none: enter(token, row). Those before it are forgotten.
  template <class Enter>
  void move_to(Range range, Enter enter) {
    if (last_ <= range.first) first_ = last_ = range.first;
    if (range.last - first_ > capacity_) {
      std::memmove(rows_, at(range.first), (last_ - range.first) * row * sizeof(float));
      first_ = range.first;
    }
    for (; last_ < range.last; last_++) enter(last_, at(last_));
  }

  const int64_t row;

 private:
  int64_t capacity_, first_ = 0, last_ = 0;
  Buffer rows_;
};

// Keys or values of the tokens in a moving range; zeros where a token is masked, whatever stands there.
class MovingTokens : public MovingRows {
 public:
  MovingTokens(const Span& span, const Tensor& tensor, int64_t width)
      : MovingRows(span, width), span_(span), tensor_(tensor), width_(width) {}

  void move_to(Range range) {
    MovingRows::move_to(range, [&](int64_t token, float* to) {
      zero(to, row);
      if (span_.is_real(token)) std::copy_n(span_.of_key(tensor_, token).data, width_, to);
    });
  }

 private:
  const Span& span_;
  const Tensor& tensor_;
  int64_t width_;
};

// Sums of gradients of the keys or values that a span owns, written out when no later query of it sees them.
class MovingSums : public MovingRows {
 public:
  MovingSums(const Span& span, const Tensor& to, int64_t width)
      : MovingRows(span, width), span_(span), to_(to), width_(width) {}

  void move_to(Range range) {
    write_until(range.first);
    if (!last()) written_ = range.first;
    MovingRows::move_to(range, [&](int64_t, float* sums) { zero(sums, row); });
  }

  void finish() { write_until(last()); }

 private:
  void write_until(int64_t token) {
    for (; written_ < std::min(token, last()); written_++)
      std::copy_n(at(written_), width_, span_.of_key(to_, written_).data);
  }

  const Span& span_;
  const Tensor& to_;
  int64_t width_, written_ = 0;
};

// Scores or weights of keys key..key + count, [key][kQueries], of the block of queries that begins at `query`: those
// that are not seen become `hidden`.
static inline void hide(const Span& span, int64_t query, int64_t key, int64_t count, float* scores, float hidden) {
  const int64_t behind = span.call.behind;
  for (int64_t j = 0; j < count; j++) {
    const int64_t ahead = span.call.block ? span.ahead_of(key + j) : span.call.ahead;
    const int64_t age = query + span.earlier - key - j;  // of the key, to the block's first query
    float* row = scores + j * kQueries;
    if (!span.is_real(key + j)) {
      std::fill(row, row + kQueries, hidden);
    } else if (age + kQueries - 1 > behind || age < -ahead) {
      for (int v = 0; v < kQueryVectors; v++) {
        const Integers ages = lane_numbers() + static_cast<int32_t>(age + v * kLanes);
        const Integers seen = (ages <= static_cast<int32_t>(behind)) & (ages >= static_cast<int32_t>(-ahead));
        store(row + v * kLanes, seen ? load(row + v * kLanes) : splat(hidden));
      }
    }
  }
}

// Products of a block of queries, [width][kQueries], with the rows of some keys, [key][kQueries]; pairs of the block that
// nobody sees may be left out.
static inline void score(const Span& span, int64_t query, Range range, const MovingTokens& rows, int64_t width,
                         const float* columns, float* scores) {
  span.for_parts(query, range, [&](Range keys, Range queries) {
    product(keys.count(), queries.count(), width, {rows.at(keys.first), rows.row, 1},
            {columns + queries.first, kQueries},
            {scores + (keys.first - range.first) * kQueries + queries.first, kQueries}, false);
  });
}

// Adds to the sums of each query, [kQueries][row], the rows of some keys times their weights, [key][kQueries].
static inline void add_rows(const Span& span, int64_t query, Range range, const MovingTokens& rows,
                            const float* weights, float* sums) {
  span.for_parts(query, range, [&](Range keys, Range queries) {
    product(queries.count(), rows.row, keys.count(),
            {weights + (keys.first - range.first) * kQueries + queries.first, 1, kQueries},
            {rows.at(keys.first), rows.row}, {sums + queries.first * rows.row, rows.row}, true);
  });
}
