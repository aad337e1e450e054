// One call of softmax attention of tiles of queries, each tile to keys of its own, and what forward and backward share.
// The structure is mirrored in polysketch/ops/hyper/native.py.
//
// A query may be in several tiles, and have seen other keys before: weights of all of them share one sum. Heads that
// share a key head share its tiles: a place of a query is that of its head among those, times `queries`, plus its token.
#pragma once

#include <vector>

#include "running_softmax.h"

constexpr int64_t kTileKeys = 128;  // keys worked on at once

struct TileAttentionCall {
  int64_t heads, key_heads, queries, width, value_width;
  int64_t tiles, rows, keys;  // of each key head: its tiles, places of a tile, and keys of a tile
  int64_t parts;              // of the queries' tokens, each of which is a unit of work forward
  float scale;
  Tensor query, key, value;
  const int32_t* query_places;  // (batch, key_heads, tiles, rows), -1 where there is no query
  const int32_t* key_places;    // (batch, key_heads, tiles, keys)
  const float* log_weights;     // likewise, added to the scores; -inf for a key that is not seen
  Tensor output, peak, mass;    // of what was seen so far; weights are exp(score - peak), and their sum is mass
  // Backward only: the gradient of the output, and what those of the inputs are added to.
  Tensor output_gradient, query_gradient, key_gradient, value_gradient;
};

// The key head that a unit works on, and the rows that places of its tiles stand for.
struct KeyHead {
  KeyHead(const TileAttentionCall& call, int64_t number)
      : call(call), number(number), batch(number / call.key_heads), key_head(number % call.key_heads),
        shared(call.heads / call.key_heads) {}

  float* of_key(const Tensor& x, int64_t place) const { return x.at(batch, key_head, place); }
  float* of_query(const Tensor& x, int64_t place) const {
    return x.at(batch, key_head * shared + place / call.queries, place % call.queries);
  }
  const int32_t* query_places(int64_t tile) const { return call.query_places + (number * call.tiles + tile) * call.rows; }
  const int32_t* key_places(int64_t tile) const { return call.key_places + (number * call.tiles + tile) * call.keys; }
  const float* log_weights(int64_t tile) const { return call.log_weights + (number * call.tiles + tile) * call.keys; }

  const TileAttentionCall& call;
  int64_t number, batch, key_head, shared;
};

// The keys that a tile sees, side by side: those that are hidden are left out. As many as fill rows of products, the
// last ones with nothing in them and a hidden score.
class SeenKeys {
 public:
  explicit SeenKeys(const KeyHead& head)
      : row(padded(head.call.width)), value_row(padded(head.call.value_width)), head_(head),
        most_(round_up(head.call.keys, kTileRows)), keys(most_ * row), values(most_ * value_row), log_weights(most_) {
    places.reserve(head.call.keys);
  }

  void read(int64_t tile) {
    places.clear();
    for (int64_t j = 0; j < head_.call.keys; j++) {
      const float log_weight = head_.log_weights(tile)[j];
      if (log_weight == -INFINITY) continue;
      const int64_t at = static_cast<int64_t>(places.size()), place = head_.key_places(tile)[j];
      copy(head_.of_key(head_.call.key, place), head_.call.width, keys + at * row, row);
      copy(head_.of_key(head_.call.value, place), head_.call.value_width, values + at * value_row, value_row);
      log_weights[at] = log_weight;
      places.push_back(place);
    }
    const int64_t seen = static_cast<int64_t>(places.size());
    count = round_up(seen, kTileRows);
    zero(keys + seen * row, (count - seen) * row);
    zero(values + seen * value_row, (count - seen) * value_row);
    std::fill(log_weights + seen, log_weights + count, kHidden);
  }

  int64_t row, value_row, count = 0;

 private:
  static void copy(const float* from, int64_t width, float* to, int64_t row) {
    std::copy_n(from, width, to);
    zero(to + width, row - width);
  }

  const KeyHead& head_;
  int64_t most_;

 public:
  Buffer keys, values, log_weights;  // [count][row], [count][value_row], [count]
  std::vector<int64_t> places;       // of those that are seen, count or a few less
};

// The queries of a tile that are there and belong to a part of the tokens: their places.
static inline void find_queries(const KeyHead& head, int64_t tile, int64_t part, std::vector<int64_t>& places) {
  const TileAttentionCall& call = head.call;
  const int64_t first = call.queries * part / call.parts, last = call.queries * (part + 1) / call.parts;
  places.clear();
  for (int64_t i = 0; i < call.rows; i++) {
    const int64_t place = head.query_places(tile)[i], token = place % call.queries;
    if (place >= 0 && token >= first && token < last) places.push_back(place);
  }
}

// The products of some queries, [width][kQueries], and keys from `first` on, plus the logs of their weights.
static inline void score(const SeenKeys& seen, int64_t first, int64_t count, int64_t width, const float* queries,
                         float* scores) {
  product(count, kQueries, width, {seen.keys + first * seen.row, seen.row, 1}, {queries, kQueries}, {scores, kQueries},
          false);
  for (int64_t j = 0; j < count; j++)
    for (int64_t v = 0; v < kQueries; v += kLanes)
      store(scores + j * kQueries + v, load(scores + j * kQueries + v) + seen.log_weights[first + j]);
}
