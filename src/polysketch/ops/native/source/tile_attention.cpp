// Softmax attention of tiles of queries to keys of their own, forward: each query goes on from what it has seen.
#include "tile_attention.h"

namespace {

class Forward {
 public:
  Forward(const TileAttentionCall& call, int64_t unit)
      : call_(call), head_(call, unit / call.parts), part_(unit % call.parts), seen_(head_),
        rows_(kQueries * padded(call.width)), queries_(call.width * kQueries), scores_(kTileKeys * kQueries),
        softmax_(seen_.value_row) {}

  void run() {
    for (int64_t tile = 0; tile < call_.tiles; tile++) {
      find_queries(head_, tile, part_, places_);
      if (places_.empty()) continue;
      seen_.read(tile);
      const int64_t count = static_cast<int64_t>(places_.size());
      for (int64_t first = 0; first < count; first += kQueries)
        block(places_.data() + first, std::min(kQueries, count - first));
    }
  }

 private:
  void block(const int64_t* places, int64_t count) {
    read(places, count);
    for (int64_t first = 0; first < seen_.count; first += kTileKeys) {
      const int64_t keys = std::min(kTileKeys, seen_.count - first);
      score(seen_, first, keys, call_.width, queries_, scores_);
      softmax_.weigh(scores_, keys);
      product(kQueries, seen_.value_row, keys, {scores_, 1, kQueries}, {seen_.values + first * seen_.value_row, seen_.value_row},
              {softmax_.output, seen_.value_row}, true);
    }
    write(places, count);
  }

  void read(const int64_t* places, int64_t count) {
    const int64_t row = padded(call_.width);
    zero(rows_, kQueries * row);
    softmax_.clear();
    for (int64_t t = 0; t < count; t++) {
      const float* query = head_.of_query(call_.query, places[t]);
      for (int64_t i = 0; i < call_.width; i++) rows_[t * row + i] = query[i] * call_.scale;
      softmax_.resume(t, *head_.of_query(call_.peak, places[t]), *head_.of_query(call_.mass, places[t]),
                      head_.of_query(call_.output, places[t]), call_.value_width);
    }
    read_columns({rows_, row}, kQueries, call_.width, queries_, kQueries);
  }

  void write(const int64_t* places, int64_t count) {
    softmax_.divide();
    for (int64_t t = 0; t < count; t++) {
      std::copy_n(softmax_.output + t * seen_.value_row, call_.value_width, head_.of_query(call_.output, places[t]));
      *head_.of_query(call_.peak, places[t]) = softmax_.peak[t];
      *head_.of_query(call_.mass, places[t]) = softmax_.mass[t];
    }
  }

  const TileAttentionCall& call_;
  KeyHead head_;
  int64_t part_;
  SeenKeys seen_;
  std::vector<int64_t> places_;
  Buffer rows_, queries_, scores_;  // [kQueries][row], [width][kQueries], [key][kQueries]
  RunningSoftmax softmax_;
};

}  // namespace

// The units first..last: parts of the tokens of key heads, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int tile_attention_forward(const TileAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Forward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
