// One call of linear attention on aligned inputs, and what forward and backward share. Names and meanings are those of
// polysketch/ops/linear/types.py; the structures here are mirrored in polysketch/ops/linear/native.py.
#pragma once

#include "sums.h"

// Which weights count; b > 1: those of blocks of b tokens, which see one another and what is before them. A block may be
// as long as several chunks, up to all of them: attention in both directions.
enum Diagonal : int64_t { kFull = -1, kNone = 0, kCausal = 1 };

constexpr int64_t kKeys = 64;                  // keys inside a chunk worked on at once
constexpr int64_t kScores = kKeys * kBlock;    // of a block of queries and so many keys

constexpr int64_t kInPlace = 128;              // features up to which a block's rows do not crowd one another out of the cache

struct LinearAttentionCall {
  int64_t heads, key_heads, queries, keys, features, value_width, local_width;
  int64_t power, factors, causal, normalize, degree, chunk, diagonal, return_sums, precision;
  float offset;
  Tensor query, key, value, local_query, local_key, log_decay;
  Tensor output, denominator;
  const int64_t* length;                 // of each batch row, or null where all rows are full
  const float *sums_in, *normalizer_in;  // (batch, key_heads, expansion, ...), contiguous; null where there are none
  float *sums_out, *normalizer_out;
  // Backward only: gradients of the outputs, and where those of the inputs go.
  Tensor output_gradient, denominator_gradient;
  const float *sums_out_gradient, *normalizer_out_gradient;
  Tensor query_gradient, key_gradient, value_gradient, local_query_gradient, local_key_gradient;
  float *sums_in_gradient, *normalizer_in_gradient;
};

// One key head of one batch row.
struct Head {
  Head(const LinearAttentionCall& call, int64_t unit)
      : call(call), unit(unit), batch(unit / call.key_heads), key_head(unit % call.key_heads),
        shared(call.heads / call.key_heads), row(padded(call.value_width)), local(call.local_query),
        factors(local ? 1 : call.factors), inner_width(local ? call.local_width : call.features / factors),
        inner_row(padded(inner_width)),
        plain(call.power * call.factors == 1), exponent(static_cast<int>(local ? call.degree : call.power)),
        chunk(std::min(call.chunk, call.keys)), by_dots(plain && !local && chunk <= kKeys),
        in_place(by_dots && call.features <= kInPlace && call.features % kLanes == 0 &&
                 call.query.token == call.features && call.key.token == call.features),
        feature_row(in_place ? call.features : odd_lines(call.features)),
        chunks_of_block(call.causal && call.diagonal > call.chunk ? call.diagonal / call.chunk : 1),
        folded(call.length ? call.length[batch] : call.keys) {
    if (local) folded -= folded % call.chunk;
  }

  Rows of_key(const Tensor& x, int64_t token) const { return rows_of(x, batch, key_head, token); }
  Rows of_query(const Tensor& x, int64_t query_head, int64_t token) const {
    return rows_of(x, batch, key_head * shared + query_head, token);
  }
  const Tensor& inner_query() const { return local ? call.local_query : call.query; }
  const Tensor& inner_key() const { return local ? call.local_key : call.key; }
  // Of rows of all parts, those of one.
  Rows part(Rows rows, int64_t factor) const { return {rows.data + factor * inner_width, rows.token}; }
  // Keys of a chunk of `size` that queries before `stop` may see.
  int64_t visible(int64_t stop, int64_t size) const {
    if (call.diagonal > kCausal) stop = round_up(stop, call.diagonal);
    return call.diagonal == kFull ? size : std::min(stop, size);
  }
  // Of `keys` keys from `key` on, those that any of a tile's queries from `first` on may see.
  int64_t seen_by_tile(int64_t first, int64_t key, int64_t keys, int64_t size) const {
    return std::clamp<int64_t>(visible(first + kTileRows, size) - key, 0, keys);
  }
  // Whether queries read chunks after their own; and whether a chunk, by its start, opens a block or closes one.
  bool reads_later_chunks() const { return chunks_of_block > 1 && call.keys > call.chunk; }
  bool opens_block(int64_t start) const { return start / call.chunk % chunks_of_block == 0; }
  bool closes_block(int64_t start) const { return opens_block(start + call.chunk); }
  int64_t last_chunk() const { return (call.keys - 1) / call.chunk * call.chunk; }
  // The first query of a chunk that sees a key, and all later ones do.
  int64_t seen_from(int64_t key) const {
    return call.diagonal == kCausal ? key : call.diagonal == kFull ? 0 : key - key % call.diagonal;
  }

  const LinearAttentionCall& call;
  int64_t unit, batch, key_head, shared, row;
  bool local;
  int64_t factors;                 // scores whose product is a weight inside a chunk, each of a part of the features
  int64_t inner_width, inner_row;  // of one such part
  bool plain;      // features stand for themselves, and lie in rows
  int exponent;
  int64_t chunk;   // tokens of the longest chunk
  bool by_dots;    // scores inside a chunk are made of rows as they are: worth it for few keys
  bool in_place;   // whole blocks of queries and keys are read where they lie, and not copied
  int64_t feature_row;  // of features in rows
  int64_t chunks_of_block;
  int64_t folded;  // tokens that end up in the sums of earlier chunks
};

// Decay inside one chunk, from differences of running totals: at most 1, so nothing overflows.
class ChunkDecay {
 public:
  explicit ChunkDecay(int64_t chunk) : read_(padded(chunk) + kBlock), fold_(read_.size()), since_(read_.size()) {}

  // Of the first `folded` tokens alone in `fold` and `carried`.
  void of(const Head& head, int64_t start, int64_t size, int64_t folded) {
    any_ = static_cast<bool>(head.call.log_decay);
    double total = 0, folded_total = 0;
    for (int64_t t = 0; t < size && any_; t++) {
      since_[t] = static_cast<float>(total += head.of_key(head.call.log_decay, start + t).data[0]);
      read_[t] = std::exp(since_[t]);
      if (t < folded) folded_total = total;
    }
    for (int64_t t = 0; t < size; t++) {
      fold_[t] = t >= folded ? 0.0f : any_ ? std::exp(std::min(0.0f, static_cast<float>(folded_total) - since_[t])) : 1.0f;
    }
    carried_ = any_ ? std::exp(folded_total) : 1.0;
    std::fill(fold_.begin() + size, fold_.end(), 0.0f);
    if (any_) std::fill(since_.begin() + size, since_.end(), static_cast<float>(total));
    if (any_) std::fill(read_.begin() + size, read_.end(), 0.0f);
  }

  bool any() const { return any_; }
  const float* read() const { return read_.data(); }    // from the start of the chunk to each token
  const float* fold() const { return fold_.data(); }    // from each token to the end; 0 where it is not folded
  const float* since() const { return since_.data(); }  // log of `read`
  double carried() const { return carried_; }           // from the start to the end

 private:
  std::vector<float> read_, fold_, since_;
  double carried_ = 1.0;
  bool any_ = false;
};

// The keys and values of one chunk; keys part after part, unless `without_keys`.
struct Chunk {
  explicit Chunk(const Head& head, bool without_keys = false)
      : part(without_keys ? 0 : head.chunk * head.inner_row), inner_keys(head.factors * part), decay(head.chunk),
        values_in_place_(head.by_dots && head.call.value.token == head.row && head.call.value_width == head.row),
        values_(values_in_place_ ? 0 : head.chunk * head.row), values(values_) {}

  // Tokens before `stop` are folded.
  void read(const Head& head, int64_t from, int64_t stop) {
    start = from;
    size = std::min(head.call.chunk, head.call.keys - from);
    const Rows of_values = head.of_key(head.call.value, start);
    if (!values_in_place_) read_rows(of_values, size, head.call.value_width, values_, head.row);
    if (values_in_place_) values = of_values.data;
    for (int64_t f = 0; f < head.factors && part; f++)
      read_rows(head.part(head.of_key(head.inner_key(), start), f), size, head.inner_width, inner_keys + f * part,
                head.inner_row);
    folded = std::clamp<int64_t>(stop - start, 0, size);
    decay.of(head, start, size, folded);
  }

  int64_t start = 0, size = 0, folded = 0, part;
  Buffer inner_keys;
  ChunkDecay decay;

 private:
  bool values_in_place_;
  Buffer values_;

 public:
  const float* values;  // [size][row]
};

// Folds tokens of a chunk into sums: keys with their values, or, backward, queries with the gradients of their outputs.
class Folder {
 public:
  explicit Folder(const Head& head)
      : tokens(std::min(kFoldTokens, round_up(head.chunk, kBlock))), head_(head),
        copy_(tokens * (head.plain ? head.feature_row : head.call.features)), x_(copy_), values_(tokens * head.row) {}

  void fold_keys(const Chunk& chunk, Sums& sums) {
    for (int64_t first = 0; first < chunk.folded; first += tokens) {
      read_keys(chunk, first);
      fold_read_keys(chunk, first, sums);
    }
  }

  // The features of at most `tokens` keys from `first` on into x().
  void read_keys(const Chunk& chunk, int64_t first) {
    read(head_.of_key(head_.call.key, chunk.start + first), std::min(tokens, chunk.size - first));
  }

  // Features of `count` tokens: in rows where they stand for themselves, else tokens innermost.
  void read(Rows from, int64_t count) {
    x_ = copy_;
    if (head_.in_place && count % kBlock == 0) {
      x_ = from.data;
    } else if (head_.plain) {
      read_rows(from, count, head_.call.features, copy_, head_.feature_row);
    } else {
      read_columns(from, count, head_.call.features, copy_, tokens);
    }
  }

  void fold_read_keys(const Chunk& chunk, int64_t first, Sums& sums) {
    const int64_t count = std::min(tokens, chunk.size - first);
    const float *factor = chunk.decay.fold() + first, *values = chunk.values + first * head_.row;
    std::copy(factor, factor + count, masses_);
    zero(masses_ + count, tokens - count);
    if (chunk.decay.any() || chunk.folded < chunk.size) {
      read_rows({const_cast<float*>(values), head_.row}, count, head_.row, values_, head_.row, factor);
      values = values_;
    }
    fold(count, values, 1.0f, sums);
  }

  // What was read, with values[count][row] and masses().
  void fold(int64_t count, const float* values, float pairs, Sums& sums) {
    if (head_.plain) {
      sums.fold_rows(x_, head_.feature_row, count, values, masses_);
    } else {
      sums.fold(x_, tokens, count, values, masses_, pairs);
    }
  }

  const int64_t tokens;  // folded at once
  const float* x() const { return x_; }
  float* values() { return values_; }
  float* masses() { return masses_; }

 private:
  const Head& head_;
  Buffer copy_;
  const float* x_;  // the copy, or where the features lie
  Buffer values_;
  float masses_[kFoldTokens];
};

// `has_read`: the chunk's keys are in the folder, all of them.
static inline void fold_chunk(const Chunk& chunk, Folder& folder, Sums& sums, bool has_read = false) {
  if (!chunk.folded) return;
  if (chunk.decay.any() && !sums.empty()) sums.scale(chunk.decay.carried());
  if (has_read) {
    folder.fold_read_keys(chunk, 0, sums);
  } else {
    folder.fold_keys(chunk, sums);
  }
}

// Scores of keys 0..visible of a chunk, x[key][feature_row], by a block of its queries from `first` on, in rows too;
// those that no query of a tile may see are left as they are.
static inline void scores_by_dots(const Head& head, int64_t first, int64_t size, int64_t visible, const float* queries,
                                  const float* x, float* scores) {
  for (int64_t m = 0; m < kBlock; m += kTileRows)
    dots(head.seen_by_tile(first + m, 0, visible, size), padded(head.call.features), queries + m * head.feature_row,
         head.feature_row, x, head.feature_row, {scores + m, kBlock});
}

static inline void start_sums(const Head& head, const Expansion& expansion, Sums& sums) {
  if (!head.call.sums_in) return;
  sums.read_from(head.call.sums_in + head.unit * expansion.size * head.call.value_width,
                 head.call.normalizer_in + head.unit * expansion.size);
}

// Vectors of a block's queries, from `first` on, that all stand before `from`.
static inline int vectors_before(int64_t from, int64_t first) {
  return from <= first ? 0 : static_cast<int>(std::min<int64_t>((from - first) / kLanes, kBlockVectors));
}

// Lanes of the queries first..first + lanes that stand at `from` or later, positions counted inside the chunk.
static inline Integers at_least(int64_t first, int64_t from) {
  return lane_numbers() + static_cast<int32_t>(first) >= static_cast<int32_t>(from);
}

// Decay from a key to queries first..first + lanes of its chunk.
static inline Vector decay_between(const ChunkDecay& decay, int64_t first, int64_t key) {
  const Vector difference = load(decay.since() + first) - decay.since()[key];
  return exponential(difference > 0.0f ? splat(0.0f) : difference);
}
