// The gradient of softmax attention of tiles of queries. Weights are made again from the scores, and from the peak and
// the mass of each query after all that it has seen. Gradients are added to what is there: a key may be in many tiles,
// all of which are its key head's, so that no sum is shared by two threads.
#include "tile_attention.h"

namespace {

class Backward {
 public:
  Backward(const TileAttentionCall& call, int64_t unit)
      : call_(call), head_(call, unit), seen_(head_), row_(seen_.row), value_row_(seen_.value_row),
        query_rows_(kQueries * row_), query_columns_(call.width * kQueries), gradient_rows_(kQueries * value_row_),
        gradient_columns_(call.value_width * kQueries), weights_(kTileKeys * kQueries), changes_(kTileKeys * kQueries),
        query_gradient_(kQueries * row_), key_sums_(round_up(call.keys, kTileRows) * row_),
        value_sums_(round_up(call.keys, kTileRows) * value_row_) {}

  void run() {
    for (int64_t tile = 0; tile < call_.tiles; tile++) {
      find_queries(head_, tile, 0, places_);
      if (places_.empty()) continue;
      seen_.read(tile);
      zero(key_sums_, seen_.count * row_);
      zero(value_sums_, seen_.count * value_row_);
      const int64_t count = static_cast<int64_t>(places_.size());
      for (int64_t first = 0; first < count; first += kQueries)
        block(places_.data() + first, std::min(kQueries, count - first));
      for (size_t j = 0; j < seen_.places.size(); j++) {
        add_scaled(1.0f, key_sums_ + j * row_, head_.of_key(call_.key_gradient, seen_.places[j]), call_.width);
        add_scaled(1.0f, value_sums_ + j * value_row_, head_.of_key(call_.value_gradient, seen_.places[j]), call_.value_width);
      }
    }
  }

 private:
  void block(const int64_t* places, int64_t count) {
    read(places, count);
    zero(query_gradient_, kQueries * row_);
    for (int64_t first = 0; first < seen_.count; first += kTileKeys)
      through(first, std::min(kTileKeys, seen_.count - first));
    for (int64_t t = 0; t < count; t++)
      add_scaled(call_.scale, query_gradient_ + t * row_, head_.of_query(call_.query_gradient, places[t]), call_.width);
  }

  // Queries times the scale and gradients of outputs, as rows and as columns; and what each query needs besides.
  void read(const int64_t* places, int64_t count) {
    zero(query_rows_, kQueries * row_);
    zero(gradient_rows_, kQueries * value_row_);
    zero(peak_, kQueries);
    zero(share_, kQueries);
    zero(mean_, kQueries);
    for (int64_t t = 0; t < count; t++) {
      const float *query = head_.of_query(call_.query, places[t]), *gradient = head_.of_query(call_.output_gradient, places[t]);
      for (int64_t i = 0; i < call_.width; i++) query_rows_[t * row_ + i] = query[i] * call_.scale;
      std::copy_n(gradient, call_.value_width, gradient_rows_ + t * value_row_);
      peak_[t] = *head_.of_query(call_.peak, places[t]);
      share_[t] = *head_.of_query(call_.mass, places[t]);
      mean_[t] = dot(gradient, head_.of_query(call_.output, places[t]), call_.value_width);
    }
    for (int64_t v = 0; v < kQueries; v += kLanes) store(share_ + v, reciprocal_or_zero(load(share_ + v)));
    read_columns({query_rows_, row_}, kQueries, call_.width, query_columns_, kQueries);
    read_columns({gradient_rows_, value_row_}, kQueries, call_.value_width, gradient_columns_, kQueries);
  }

  // Adds the gradients through the weights of some keys.
  void through(int64_t first, int64_t count) {
    const float *keys = seen_.keys + first * row_, *values = seen_.values + first * value_row_;
    score(seen_, first, count, call_.width, query_columns_, weights_);
    product(count, kQueries, call_.value_width, {values, value_row_, 1}, {gradient_columns_, kQueries},
            {changes_, kQueries}, false);
    weigh_gradients(count, peak_, share_, mean_, weights_, changes_);
    product(kQueries, row_, count, {changes_, 1, kQueries}, {keys, row_}, {query_gradient_, row_}, true);
    product(count, row_, kQueries, {changes_, kQueries, 1}, {query_rows_, row_}, {key_sums_ + first * row_, row_}, true);
    product(count, value_row_, kQueries, {weights_, kQueries, 1}, {gradient_rows_, value_row_},
            {value_sums_ + first * value_row_, value_row_}, true);
  }

  const TileAttentionCall& call_;
  KeyHead head_;
  SeenKeys seen_;
  std::vector<int64_t> places_;
  int64_t row_, value_row_;
  Buffer query_rows_, query_columns_, gradient_rows_, gradient_columns_, weights_, changes_, query_gradient_;
  Buffer key_sums_, value_sums_;             // [key][row], [key][value_row]
  float peak_[kQueries], share_[kQueries], mean_[kQueries];  // share: 1 / mass; mean: of the shares' gradients
};

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int tile_attention_backward(const TileAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Backward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
