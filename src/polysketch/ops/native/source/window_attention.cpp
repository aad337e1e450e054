// Softmax attention within a window, forward: blocks of keys one after another, with weights relative to the largest
// score so far.
#include "window_attention.h"

namespace {

class Forward {
 public:
  Forward(const WindowAttentionCall& call, int64_t unit)
      : call_(call), span_(call, unit), keys_(span_, call.key, call.width), values_(span_, call.value, call.value_width),
        row_(values_.row), query_(call.width * kQueries), scores_(kKeys * kQueries), softmax_(row_) {}

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
    const WindowAttentionCall& call = call_;
    const int64_t count = std::min(kQueries, call.queries - query);
    read_columns(span_.of_query(call.query, shared, query), count, call.width, query_, kQueries);
    for (int64_t i = 0; i < call.width * kQueries; i += kLanes) store(query_ + i, load(query_ + i) * call.scale);
    start(shared, query, count);
    for (int64_t key = seen.first; key < seen.last; key += kKeys)
      through(query, {key, std::min(key + kKeys, seen.last)});
    write(shared, query, count);
  }

  // Adds values of some keys times their weights.
  void through(int64_t query, Range range) {
    score(span_, query, range, keys_, call_.width, query_, scores_);
    hide(span_, query, range.first, range.count(), scores_, kHidden);
    softmax_.weigh(scores_, range.count());
    add_rows(span_, query, range, values_, scores_, softmax_.output);
  }

  // The key beside is the first of all: its weight relative to itself is one.
  void start(int64_t shared, int64_t query, int64_t count) {
    const WindowAttentionCall& call = call_;
    softmax_.clear();
    for (int64_t t = 0; call.beside_logit && t < count; t++) {
      const float logit = *span_.of_query(call.beside_logit, shared, query + t).data;
      if (logit <= kLowest) continue;  // not a NaN
      softmax_.resume(t, logit, 1.0f, span_.of_query(call.beside_value, shared, query + t).data, call.value_width);
    }
  }

  void write(int64_t shared, int64_t query, int64_t count) {
    const WindowAttentionCall& call = call_;
    softmax_.divide();
    write_rows(softmax_.output, row_, count, call.value_width, span_.of_query(call.output, shared, query), false);
    for (int64_t t = 0; t < count; t++) {
      *span_.of_query(call.peak, shared, query + t).data = softmax_.peak[t];
      *span_.of_query(call.mass, shared, query + t).data = softmax_.mass[t];
    }
  }

  const WindowAttentionCall& call_;
  Span span_;
  MovingTokens keys_, values_;
  int64_t row_;
  Buffer query_, scores_;  // [width][kQueries], [key][kQueries]
  RunningSoftmax softmax_;
};

}  // namespace

// The spans first..last, counted over key heads and batch. Returns 0, or 1 where memory ran out.
extern "C" int window_attention_forward(const WindowAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Forward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
