// The gradient of linear attention; nothing of the forward pass is kept but its output. One pass in order rebuilds the
// sums and gives the gradients of queries and of everything inside chunks; one in reverse carries the gradient of the
// sums and gives those of keys and values through them.
#include "linear_attention.h"

namespace {

// Gradients of numerators and denominators of kBlock queries, from those of their outputs.
class Upstream {
 public:
  explicit Upstream(const Head& head) : head_(head), rows(kBlock * head.row), columns(head.row * kBlock) {
    zero(rows, kBlock * head.row);
  }

  // `decay` is that of each query since the start of its chunk, or null; `turned`: whether the columns are wanted too.
  void read(int64_t shared, int64_t token, int64_t count, const float* decay, bool turned = true) {
    const LinearAttentionCall& call = head_.call;
    zero(rows + count * head_.row, (kBlock - count) * head_.row);
    zero(masses + count, kBlock - count);
    for (int64_t t = 0; t < count; t++) {
      const float* output = head_.of_query(call.output, shared, token + t).data;
      const float* gradient = head_.of_query(call.output_gradient, shared, token + t).data;
      const float factor = call.normalize ? reciprocal_mass(*head_.of_query(call.denominator, shared, token + t).data) : 1.0f;
      const float by = decay ? decay[t] : 1.0f, through_mass = call.normalize ? dot(gradient, output, call.value_width) : 0.0f;
      for (int64_t i = 0; i < call.value_width; i++) rows[t * head_.row + i] = gradient[i] * factor * by;
      masses[t] = (*head_.of_query(call.denominator_gradient, shared, token + t).data - through_mass * factor) * by;
    }
    if (turned) read_columns({rows, head_.row}, kBlock, head_.row, columns, kBlock);
  }

 private:
  const Head& head_;

 public:
  Buffer rows, columns;  // [kBlock][row] and [row][kBlock]
  float masses[kBlock];
};

// The queries of a chunk of few tokens, all that share its keys, and what goes from them to those keys.
struct QueriesOfChunk {
  explicit QueriesOfChunk(const Head& head)
      : head(head), tokens(head.by_dots ? round_up(head.chunk, kBlock) : 0), count(head.shared * tokens),
        changes(count * tokens), values(count * head.row), masses(count), copy_(count * head.feature_row), queries(copy_) {}

  void clear(int64_t size) {
    in_place_ = head.in_place && head.shared == 1 && size == tokens;
    zero(changes, count * tokens);
    if (tokens == kBlock) return;  // each block writes its own rows, and there is one
    zero(copy_, count * head.feature_row);
    zero(values, count * head.row);
    zero(masses, count);
  }

  // Features of `size` queries of a block, zeros up to kBlock.
  void read(int64_t shared, int64_t start, int64_t first, int64_t size) {
    const Rows from = head.of_query(head.call.query, shared, start);
    queries = in_place_ ? from.data : copy_;
    if (in_place_) return;
    float* to = copy_ + (shared * tokens + first) * head.feature_row;
    read_rows({from.at(first), from.token}, size, head.call.features, to, head.feature_row);
    zero(to + size * head.feature_row, (kBlock - size) * head.feature_row);
  }

  void fold(Sums& sums) const {
    for (int64_t first = 0; first < count; first += kFoldTokens)
      sums.fold_rows(queries + first * head.feature_row, head.feature_row, std::min(kFoldTokens, count - first),
                     values + first * head.row, masses + first);
  }

  const Head& head;
  int64_t tokens, count;  // of each head, and of all; zeros behind those that there are
  // Gradients of scores [query][key of the chunk], of numerators and of denominators; rows of features, copied or where they lie.
  Buffer changes, values, masses;

 private:
  Buffer copy_;
  bool in_place_ = false;

 public:
  const float* queries;
};

class Backward {
 public:
  Backward(const LinearAttentionCall& call, int64_t unit)
      : head_(call, unit), expansion_(call.features, call.power, call.factors), sums_(expansion_, call.value_width, call.precision),
        carried_(expansion_, call.value_width, call.precision), chunk_(head_, head_.by_dots), folder_(head_), upstream_(head_),
        x_(kBlock * (head_.plain ? head_.feature_row : call.features)), x_gradient_(call.features * kBlock),
        inner_query_(head_.factors * head_.inner_width * kBlock), inner_query_rows_(head_.factors * query_part()),
        inner_query_gradient_(head_.factors * query_part()), weights_(head_.factors * kScores),
        changes_(head_.factors * kScores), block_values_(head_.row * kBlock),
        values_gradient_(head_.chunk * head_.row),
        keys_gradient_(head_.by_dots ? 0 : head_.factors * head_.chunk * head_.inner_row), of_chunk_(head_) {}

  void run() {
    start_sums(head_, expansion_, sums_);
    if (head_.call.causal) {
      queries_in_order();
      keys_in_reverse();
      if (head_.reads_later_chunks()) {
        queries_of_later_chunks();
        keys_of_earlier_chunks();
      }
    } else {
      all();
    }
  }

 private:
  void queries_in_order() {
    const LinearAttentionCall& call = head_.call;
    for (int64_t start = 0; start < call.keys; start += call.chunk) {
      chunk_.read(head_, start, head_.folded);
      if (head_.by_dots) {
        folder_.read_keys(chunk_, 0);
      } else {
        zero(values_gradient_, chunk_.size * head_.row);
        for (int64_t f = 0; f < head_.factors; f++) zero(keys_gradient_ + f * chunk_.part, chunk_.size * head_.inner_row);
      }
      for (int64_t shared = 0; shared < head_.shared; shared++)
        for (int64_t first = 0; first < chunk_.size; first += kBlock) queries_of_block(shared, first);
      if (!head_.by_dots) write_keys_inside(start);
      if (start + call.chunk < call.keys) fold_chunk(chunk_, folder_, sums_, head_.by_dots);
    }
  }

  // What the chunk itself gave to its keys and values.
  void write_keys_inside(int64_t start) {
    const LinearAttentionCall& call = head_.call;
    const Tensor& inner_key_gradient = head_.local ? call.local_key_gradient : call.key_gradient;
    write_rows(values_gradient_, head_.row, chunk_.size, call.value_width, head_.of_key(call.value_gradient, start), false);
    for (int64_t f = 0; f < head_.factors; f++)
      write_rows(keys_gradient_ + f * chunk_.part, head_.inner_row, chunk_.size, head_.inner_width,
                 head_.part(head_.of_key(inner_key_gradient, start), f), false);
  }

  void queries_of_block(int64_t shared, int64_t first) {
    const LinearAttentionCall& call = head_.call;
    const int64_t token = chunk_.start + first, count = std::min(kBlock, chunk_.size - first);
    if (head_.by_dots) return queries_by_dots(shared, first, count);
    upstream_.read(shared, token, count, chunk_.decay.any() ? chunk_.decay.read() + first : nullptr);
    through_sums(shared, token, count, false);
    if (call.diagonal == kNone) return;
    if (chunk_.decay.any()) upstream_.read(shared, token, count, nullptr);
    inside(shared, first, count);
    const Tensor& target = head_.local ? call.local_query_gradient : call.query_gradient;
    for (int64_t f = 0; f < head_.factors; f++)
      write_rows(inner_query_gradient_ + f * query_part(), head_.inner_row, count, head_.inner_width,
                 head_.part(head_.of_query(target, shared, token), f), !head_.local);
  }

  // Few keys, whose features lie in rows as they are: gradients of a query's features are added up for some of them after
  // others, through the sums and inside the chunk.
  void queries_by_dots(int64_t shared, int64_t first, int64_t count) {
    const LinearAttentionCall& call = head_.call;
    const int64_t token = chunk_.start + first, visible = seen_by_block(first);
    upstream_.read(shared, token, count, nullptr);
    changes_by_dots(first, visible);
    if (chunk_.decay.any()) upstream_.read(shared, token, count, chunk_.decay.read() + first);
    const Rows target = head_.of_query(call.query_gradient, shared, token);
    sums_.read_rows_backward(upstream_.columns, upstream_.masses, [&](int64_t from, int64_t to, float* gradient) {
      for (int64_t m = 0; m < kBlock && visible; m += kPanel)
        product(to - from, kPanel, seen_by_panel(first + m, visible), {folder_.x() + from, 1, head_.feature_row},
                {changes_ + m, kBlock}, {gradient + m, kBlock}, true);
      write_columns(gradient, kBlock, count, to - from, {target.data + from, target.token}, false);
    });
  }

  // Gradients of the chunk's scores, for a block of queries whose upstream gradients have been read.
  void changes_by_dots(int64_t first, int64_t visible) {
    for (int64_t m = 0; m < kBlock; m += kPanel)
      product(seen_by_panel(first + m, visible), kPanel, head_.call.value_width, {chunk_.values, head_.row, 1},
              {upstream_.columns + m, kBlock}, {changes_ + m, kBlock}, false);
    for (int64_t key = 0; key < visible; key++) {
      float* row = changes_ + key * kBlock;
      for (int64_t t = 0; t < kBlock; t += kLanes) store(row + t, load(row + t) + load(upstream_.masses + t));
      see(first, key, row);
    }
  }

  // Of one key's row over a block of queries: times the decay to each, and zeros at those that do not see it.
  void see(int64_t first, int64_t key, float* row) const {
    const int64_t from = head_.seen_from(key);
    const int unseen = vectors_before(from, first);
    for (int v = 0; v < unseen; v++) store(row + v * kLanes, Vector{});
    for (int v = unseen; v < kBlockVectors; v++) {
      const int64_t query = first + v * kLanes;
      Vector entry = load(row + v * kLanes);
      if (chunk_.decay.any()) entry *= decay_between(chunk_.decay, query, key);
      store(row + v * kLanes, from > query ? keep(entry, at_least(query, from)) : entry);
    }
  }

  // Features of `count` tokens in rows, zeros up to kBlock.
  void read_block(Rows from, int64_t count) {
    read_rows(from, count, head_.call.features, x_, head_.feature_row);
    zero(x_ + count * head_.feature_row, (kBlock - count) * head_.feature_row);
  }

  // Keys that any of a block's queries may see inside the chunk.
  int64_t seen_by_block(int64_t first) const {
    return head_.call.diagonal == kNone ? 0 : head_.visible(first + kBlock, chunk_.size);
  }

  // Keys that any of kPanel queries from `first` on may see.
  int64_t seen_by_panel(int64_t first, int64_t visible) const {
    return std::min(head_.visible(first + kPanel, chunk_.size), visible);
  }

  // work(key, keys, query): a tile's keys, and the first query of the block, by its place in it, that sees any of them.
  template <class Work>
  void for_key_tiles(int64_t first, int64_t visible, Work work) const {
    for (int64_t key = 0; key < visible; key += kTileRows)
      work(key, std::min<int64_t>(kTileRows, visible - key), std::clamp<int64_t>(head_.seen_from(key) - first, 0, kBlock));
  }

  // Query gradients through the sums.
  void through_sums(int64_t shared, int64_t token, int64_t count, bool add) {
    const LinearAttentionCall& call = head_.call;
    if (head_.plain) {
      const Rows target = head_.of_query(call.query_gradient, shared, token);
      sums_.read_rows_backward(upstream_.columns, upstream_.masses, [&](int64_t from, int64_t to, const float* gradient) {
        write_columns(gradient, kBlock, count, to - from, {target.data + from, target.token}, add);
      });
      return;
    }
    zero(x_gradient_, call.features * kBlock);
    if (!sums_.empty()) {
      read_columns(head_.of_query(call.query, shared, token), count, call.features, x_, kBlock);
      sums_.read_backward(x_, 2.0f, upstream_.columns, upstream_.masses, x_gradient_);
    }
    write_columns(x_gradient_, kBlock, count, call.features, head_.of_query(call.query_gradient, shared, token), add);
  }

  // Gradients through the weights inside the chunk: of queries, and added up for the chunk's keys and values.
  void inside(int64_t shared, int64_t first, int64_t count) {
    const int64_t visible = head_.visible(first + kBlock, chunk_.size), width = head_.inner_width, row = head_.inner_row;
    const Rows queries = head_.of_query(head_.inner_query(), shared, chunk_.start + first);
    read_columns(queries, count, head_.factors * width, inner_query_, kBlock);
    zero(inner_query_rows_, head_.factors * query_part());
    for (int64_t f = 0; f < head_.factors; f++)
      read_rows(head_.part(queries, f), count, width, inner_query_rows_ + f * query_part(), row);
    for (int64_t key = 0; key < visible; key += kKeys) {
      const int64_t keys = std::min(kKeys, visible - key);
      const float *of_keys = chunk_.inner_keys + key * row, *of_values = chunk_.values + key * head_.row;
      for (int64_t f = 0; f < head_.factors; f++)
        product(head_.call.precision, keys, kBlock, width, {of_keys + f * chunk_.part, row, 1}, {inner_query_ + f * width * kBlock, kBlock},
                {weights_ + f * kScores, kBlock}, false);
      product(head_.call.precision, keys, kBlock, head_.call.value_width, {of_values, head_.row, 1}, {upstream_.columns, kBlock},
              {changes_, kBlock}, false);
      for (int64_t j = 0; j < keys; j++) weigh(first, key + j, weights_ + j * kBlock, changes_ + j * kBlock);
      product(head_.call.precision, keys, head_.row, kBlock, {weights_, kBlock, 1}, {upstream_.rows, head_.row},
              {values_gradient_ + key * head_.row, head_.row}, true);
      for (int64_t f = 0; f < head_.factors; f++) {
        const float* changes = changes_ + f * kScores;
        product(head_.call.precision, kBlock, row, keys, {changes, 1, kBlock}, {of_keys + f * chunk_.part, row},
                {inner_query_gradient_ + f * query_part(), row}, key > 0);
        product(head_.call.precision, keys, row, kBlock, {changes, kBlock, 1}, {inner_query_rows_ + f * query_part(), row},
                {keys_gradient_ + f * chunk_.part + key * row, row}, true);
      }
    }
  }

  // Scores of one key -> its weights; gradients of numerators by its value -> gradients of its scores.
  void weigh(int64_t first, int64_t key, float* scores, float* changes) {
    const int64_t from = head_.seen_from(key);
    const int unseen = vectors_before(from, first);
    for (int v = 0; v < unseen; v++) {
      store(scores + v * kLanes, Vector{});
      for (int64_t f = 0; f < head_.factors; f++) store(changes + f * kScores + v * kLanes, Vector{});
    }
    for (int v = unseen; v < kBlockVectors; v++) {
      const int64_t query = first + v * kLanes;
      const Vector score = load(scores + v * kLanes);
      Vector slope = power_of(score, head_.exponent - 1);
      if (chunk_.decay.any() && !head_.local) slope *= decay_between(chunk_.decay, query, key);
      if (from > query) slope = keep(slope, at_least(query, from));
      const Vector change = load(changes + v * kLanes) + load(upstream_.masses + v * kLanes);
      if (head_.factors == 2) {
        const Vector other = load(scores + kScores + v * kLanes);
        store(scores + v * kLanes, score * other * slope);
        store(changes + v * kLanes, change * slope * other);
        store(changes + kScores + v * kLanes, change * slope * score);
        continue;
      }
      store(scores + v * kLanes, from > query ? keep(score * slope, at_least(query, from)) : score * slope);
      const Vector through = change * slope * static_cast<float>(head_.exponent);
      store(changes + v * kLanes, from > query ? keep(through, at_least(query, from)) : through);
    }
  }

  int64_t query_part() const { return kBlock * head_.inner_row; }

  void keys_in_reverse() {
    const LinearAttentionCall& call = head_.call;
    const int64_t place = head_.unit * expansion_.size;
    if (call.return_sums) start_carried();
    for (int64_t start = head_.last_chunk(); start >= 0; start -= call.chunk) {
      chunk_.read(head_, start, head_.folded);
      if (head_.by_dots) {
        keys_by_dots();
      } else {
        keys_of_chunk(true, !head_.local);
      }
      if (chunk_.decay.any() && chunk_.folded && !carried_.empty()) carried_.scale(chunk_.decay.carried());
      if (start == 0 && !call.sums_in) break;  // nothing comes before the first chunk
      if (head_.by_dots) {
        of_chunk_.fold(carried_);
      } else {
        fold_queries(start, chunk_.size, chunk_.decay.any() ? chunk_.decay.read() : nullptr);
      }
    }
    if (call.sums_in_gradient)
      carried_.write_to(call.sums_in_gradient + place * call.value_width, call.normalizer_in_gradient + place);
  }

  // Gradients of the keys and values of few tokens, inside the chunk and through the sums. Its queries are left in
  // `of_chunk_`, to be folded.
  void keys_by_dots() {
    folder_.read_keys(chunk_, 0);
    zero(values_gradient_, chunk_.size * head_.row);
    of_chunk_.clear(chunk_.size);
    for (int64_t shared = 0; shared < head_.shared; shared++)
      for (int64_t first = 0; first < chunk_.size; first += kBlock) queries_to_keys(shared, first);
    for (int64_t first = 0; first < chunk_.size; first += kBlock) keys_of_block(first, std::min(kBlock, chunk_.size - first));
  }

  // What a block of queries gives to the values of its chunk; its rows, and the gradients of its scores, are kept.
  void queries_to_keys(int64_t shared, int64_t first) {
    const int64_t token = chunk_.start + first, count = std::min(kBlock, chunk_.size - first), visible = seen_by_block(first);
    const int64_t place = shared * of_chunk_.tokens + first;
    of_chunk_.read(shared, chunk_.start, first, count);
    const float* queries = of_chunk_.queries + place * head_.feature_row;
    upstream_.read(shared, token, count, nullptr);
    if (visible) {
      scores_by_dots(head_, first, chunk_.size, visible, queries, folder_.x(), weights_);
      for (int64_t key = 0; key < visible; key++) see(first, key, weights_ + key * kBlock);
      for_key_tiles(first, visible, [&](int64_t key, int64_t keys, int64_t query) {
        product(keys, head_.row, kBlock - query, {weights_ + key * kBlock + query, kBlock, 1},
                {upstream_.rows + query * head_.row, head_.row}, {values_gradient_ + key * head_.row, head_.row}, true);
      });
      changes_by_dots(first, visible);
      turn(changes_, kBlock, visible, kBlock, of_chunk_.changes + place * of_chunk_.tokens, of_chunk_.tokens, false);
    }
    if (chunk_.decay.any()) upstream_.read(shared, token, count, chunk_.decay.read() + first, false);
    std::copy(upstream_.rows + 0, upstream_.rows + kBlock * head_.row, of_chunk_.values + place * head_.row);
    std::copy(upstream_.masses, upstream_.masses + kBlock, of_chunk_.masses + place);
  }

  // Gradients of a block of keys and values: what the chunk's queries have left, and what later chunks have.
  void keys_of_block(int64_t first, int64_t count) {
    const LinearAttentionCall& call = head_.call;
    const int64_t token = chunk_.start + first, row = head_.row;
    const float *factor = chunk_.decay.fold() + first, *values = chunk_.values + first * row;
    if (!carried_.empty()) {
      carried_.read_rows(folder_.x() + first * head_.feature_row, head_.feature_row, inner_values(), nullptr);
      for (int64_t t = 0; t < count; t++)
        add_scaled(factor[t], inner_values() + t * row, values_gradient_ + (first + t) * row, row);
    }
    write_rows(values_gradient_ + first * row, row, count, call.value_width, head_.of_key(call.value_gradient, token), false);
    read_rows({const_cast<float*>(values), row}, count, row, inner_values(), row, factor);
    read_columns({inner_values(), row}, count, row, block_values_, kBlock);
    const Rows target = head_.of_key(call.key_gradient, token);
    carried_.read_rows_backward(block_values_, factor, [&](int64_t from, int64_t to, float* gradient) {
      for (int64_t m = 0; m < count; m += kPanel) add_changes(first + m, from, to, gradient + m);
      write_columns(gradient, kBlock, count, to - from, {target.data + from, target.token}, false);
    });
  }

  // What the chunk's queries give to kPanel of its keys from `key` on, features from..to, gradient[feature][kBlock].
  void add_changes(int64_t key, int64_t from, int64_t to, float* gradient) const {
    const int64_t query = head_.seen_from(key);
    for (int64_t shared = 0; shared < head_.shared && head_.call.diagonal != kNone; shared++) {
      const int64_t place = shared * of_chunk_.tokens + query;
      product(to - from, kPanel, chunk_.size - query, {of_chunk_.queries + place * head_.feature_row + from, 1, head_.feature_row},
              {of_chunk_.changes + place * of_chunk_.tokens + key, of_chunk_.tokens}, {gradient, kBlock}, true);
    }
  }

  // Gradients of a chunk's keys and values through the sums that they were folded into.
  void keys_of_chunk(bool add_values, bool add_keys) {
    const LinearAttentionCall& call = head_.call;
    static const float ones[kBlock] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t first = 0; first < chunk_.size; first += kBlock) {
      const int64_t start = chunk_.start + first, count = std::min(kBlock, chunk_.size - first);
      if (head_.plain && !carried_.empty() && first < chunk_.folded) {
        keys_in_rows(first, count, add_values, add_keys);
        continue;
      }
      const float* factor = chunk_.decay.fold() + first;
      float ignored[kBlock];
      zero(x_gradient_, call.features * kBlock);
      zero(inner_values(), kBlock * head_.row);
      if (!carried_.empty() && first < chunk_.folded) {
        read_columns(head_.of_key(call.key, start), count, call.features, x_, kBlock);
        carried_.read(x_, 1.0f, inner_values(), ignored);
        read_columns({const_cast<float*>(chunk_.values) + first * head_.row, head_.row}, count, head_.row, block_values_, kBlock);
        carried_.read_backward(x_, 1.0f, block_values_, ones, x_gradient_);
        for (int64_t i = 0; i < call.features * kBlock; i++) x_gradient_[i] *= factor[i % kBlock];
        for (int64_t t = 0; t < count; t++)
          for (int64_t i = 0; i < head_.row; i++) inner_values()[t * head_.row + i] *= factor[t];
      }
      write_rows(inner_values(), head_.row, count, call.value_width, head_.of_key(call.value_gradient, start), add_values);
      write_columns(x_gradient_, kBlock, count, call.features, head_.of_key(call.key_gradient, start), add_keys);
    }
  }

  // The same of one block whose features lie in rows.
  void keys_in_rows(int64_t first, int64_t count, bool add_values, bool add_keys) {
    const LinearAttentionCall& call = head_.call;
    const int64_t start = chunk_.start + first, row = head_.row;
    const float *factor = chunk_.decay.fold() + first, *values = chunk_.values + first * row;
    read_block(head_.of_key(call.key, start), count);
    carried_.read_rows(x_, head_.feature_row, inner_values(), nullptr);
    scale_rows(inner_values(), factor, count);
    write_rows(inner_values(), row, count, call.value_width, head_.of_key(call.value_gradient, start), add_values);
    std::copy(values, values + count * row, inner_values());
    scale_rows(inner_values(), factor, count);
    read_columns({inner_values(), row}, count, row, block_values_, kBlock);
    const Rows target = head_.of_key(call.key_gradient, start);
    carried_.read_rows_backward(block_values_, factor, [&](int64_t from, int64_t to, const float* gradient) {
      write_columns(gradient, kBlock, count, to - from, {target.data + from, target.token}, add_keys);
    });
  }

  void scale_rows(float* rows, const float* factor, int64_t count) const {
    for (int64_t t = 0; t < count; t++)
      for (int64_t i = 0; i < head_.row; i++) rows[t * head_.row + i] *= factor[t];
  }

  // In reverse: queries have read the later chunks of their block.
  void queries_of_later_chunks() {
    const LinearAttentionCall& call = head_.call;
    sums_.clear();
    for (int64_t start = head_.last_chunk(); start >= 0; start -= call.chunk) {
      if (head_.closes_block(start)) sums_.clear();
      chunk_.read(head_, start, call.keys);
      for (int64_t shared = 0; shared < head_.shared && !sums_.empty(); shared++)
        for (int64_t first = 0; first < chunk_.size; first += kBlock) {
          const int64_t count = std::min(kBlock, chunk_.size - first);
          upstream_.read(shared, start + first, count, nullptr);
          through_sums(shared, start + first, count, true);
        }
      if (!head_.opens_block(start)) fold_chunk(chunk_, folder_, sums_);
    }
  }

  // In order: keys and values have been read by the queries of earlier chunks of their block.
  void keys_of_earlier_chunks() {
    const LinearAttentionCall& call = head_.call;
    for (int64_t start = 0; start < call.keys; start += call.chunk) {
      if (head_.opens_block(start)) carried_.clear();
      chunk_.read(head_, start, call.keys);
      if (!carried_.empty()) keys_of_chunk(true, true);
      if (!head_.closes_block(start) && start + call.chunk < call.keys) fold_queries(start, chunk_.size, nullptr);
    }
  }

  float* inner_values() { return folder_.values(); }

  // Queries read the sums; in reverse the gradients of what they read are folded.
  void fold_queries(int64_t start, int64_t size, const float* decay) {
    const LinearAttentionCall& call = head_.call;
    for (int64_t shared = 0; shared < head_.shared; shared++)
      for (int64_t first = 0; first < size; first += folder_.tokens) {
        const int64_t count = std::min(folder_.tokens, size - first);
        folder_.read(head_.of_query(call.query, shared, start + first), count);
        zero(folder_.masses(), folder_.tokens);
        for (int64_t t = 0; t < count; t += kBlock) {
          upstream_.read(shared, start + first + t, std::min(kBlock, count - t), decay ? decay + first + t : nullptr, false);
          std::copy(upstream_.rows + 0, upstream_.rows + kBlock * head_.row, folder_.values() + t * head_.row);
          std::copy(upstream_.masses, upstream_.masses + kBlock, folder_.masses() + t);
        }
        folder_.fold(count, folder_.values(), 2.0f, carried_);
      }
  }

  void all() {
    const LinearAttentionCall& call = head_.call;
    if (call.return_sums) start_carried();
    if (call.queries > 0) queries_of_all();
    for (int64_t start = head_.last_chunk(); start >= 0; start -= call.chunk) {
      chunk_.read(head_, start, head_.folded);
      keys_of_chunk(false, false);
      if (chunk_.decay.any() && chunk_.folded && !carried_.empty()) carried_.scale(chunk_.decay.carried());
    }
  }

  // Query gradients, and the gradient of the sums that the queries have read.
  void queries_of_all() {
    const LinearAttentionCall& call = head_.call;
    for (int64_t start = 0; start < call.keys; start += call.chunk) {
      chunk_.read(head_, start, head_.folded);
      fold_chunk(chunk_, folder_, sums_);
    }
    for (int64_t shared = 0; shared < head_.shared; shared++)
      for (int64_t first = 0; first < call.queries; first += kBlock) {
        const int64_t count = std::min(kBlock, call.queries - first);
        upstream_.read(shared, first, count, nullptr);
        through_sums(shared, first, count, false);
      }
    fold_queries(0, call.queries, nullptr);
  }

  void start_carried() {
    const LinearAttentionCall& call = head_.call;
    const int64_t place = head_.unit * expansion_.size;
    carried_.read_from(call.sums_out_gradient + place * call.value_width, call.normalizer_out_gradient + place);
  }

  Head head_;
  Expansion expansion_;
  Sums sums_, carried_;
  Chunk chunk_;
  Folder folder_;
  Upstream upstream_;
  Buffer x_, x_gradient_, inner_query_, inner_query_rows_, inner_query_gradient_, weights_, changes_, block_values_;
  Buffer values_gradient_, keys_gradient_;
  QueriesOfChunk of_chunk_;
};

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int linear_attention_backward(const LinearAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Backward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
