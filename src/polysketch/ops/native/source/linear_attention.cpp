// Linear attention, forward: PolySketchFormer, section 3.1, one key head at a time.
#include "linear_attention.h"

namespace {

class Forward {
 public:
  Forward(const LinearAttentionCall& call, int64_t unit)
      : head_(call, unit), expansion_(call.features, call.power, call.factors), sums_(expansion_, call.value_width, call.precision),
        keys_in_folder_(!head_.local && head_.chunk <= kFoldTokens), chunk_(head_, keys_in_folder_), folder_(head_),
        copy_(kBlock * std::max(call.features, head_.plain ? head_.feature_row : 0)), query_(copy_), inner_query_(head_.inner_width * kBlock),
        weights_(head_.factors * kScores), output_(kBlock * head_.row) {}

  void run() {
    if (head_.reads_later_chunks()) later_chunks();
    start_sums(head_, expansion_, sums_);
    if (head_.call.causal) {
      causal();
    } else {
      all();
    }
    if (!head_.call.return_sums) return;
    const int64_t place = head_.unit * expansion_.size;
    sums_.write_to(head_.call.sums_out + place * head_.call.value_width, head_.call.normalizer_out + place);
  }

 private:
  // In reverse: numerators and masses of the later chunks of every query's block, into the outputs.
  void later_chunks() {
    for (int64_t start = head_.last_chunk(); start >= 0; start -= head_.call.chunk) {
      if (head_.closes_block(start)) sums_.clear();
      chunk_.read(head_, start, head_.call.keys);
      for (int64_t shared = 0; shared < head_.shared; shared++)
        for (int64_t first = 0; first < chunk_.size; first += kBlock) {
          const int64_t count = std::min(kBlock, chunk_.size - first);
          read(shared, start + first, count, nullptr);
          resolve(count, 0.0f, nullptr);
          write_rows(output_, head_.row, count, head_.call.value_width, head_.of_query(head_.call.output, shared, start + first), false);
          write_columns(mass_, kBlock, count, 1, head_.of_query(head_.call.denominator, shared, start + first), false);
        }
      if (!head_.opens_block(start)) fold_chunk(chunk_, folder_, sums_);
    }
    sums_.clear();
  }

  void causal() {
    const LinearAttentionCall& call = head_.call;
    for (int64_t start = 0; start < call.keys; start += call.chunk) {
      chunk_.read(head_, start, head_.folded);
      if (keys_in_folder_) folder_.read_keys(chunk_, 0);
      for (int64_t shared = 0; shared < head_.shared; shared++)
        for (int64_t first = 0; first < chunk_.size; first += kBlock) {
          read(shared, start + first, std::min(kBlock, chunk_.size - first), chunk_.decay.read() + first);
          if (head_.reads_later_chunks()) add_later(shared, start + first, std::min(kBlock, chunk_.size - first));
          if (call.diagonal != kNone) inside(shared, first);
          resolve(std::min(kBlock, chunk_.size - first), call.offset, chunk_.decay.any() ? chunk_.decay.read() + first : nullptr);
          write(shared, start + first, std::min(kBlock, chunk_.size - first));
        }
      if (start + call.chunk < call.keys || call.return_sums) fold_chunk(chunk_, folder_, sums_, keys_in_folder_);
    }
  }

  void add_later(int64_t shared, int64_t token, int64_t count) {
    const Rows output = head_.of_query(head_.call.output, shared, token), mass = head_.of_query(head_.call.denominator, shared, token);
    for (int64_t t = 0; t < count; t++) {
      for (int64_t i = 0; i < head_.call.value_width; i++) output_[t * head_.row + i] += output.at(t)[i];
      mass_[t] += *mass.at(t);
    }
  }

  void all() {
    for (int64_t start = 0; start < head_.call.keys; start += head_.call.chunk) {
      chunk_.read(head_, start, head_.folded);
      fold_chunk(chunk_, folder_, sums_);
    }
    for (int64_t shared = 0; shared < head_.shared; shared++)
      for (int64_t first = 0; first < head_.call.queries; first += kBlock) {
        const int64_t count = std::min(kBlock, head_.call.queries - first);
        read(shared, first, count, nullptr);
        resolve(count, head_.call.offset, nullptr);
        write(shared, first, count);
      }
  }

  // What the sums give to `count` queries, times their decay.
  void read(int64_t shared, int64_t token, int64_t count, const float* decay) {
    if (!sums_.empty() || !head_.local) read_queries(head_.of_query(head_.call.query, shared, token), count);
    if (sums_.empty()) {
      zero(output_, kBlock * head_.row);
      zero(mass_, kBlock);
      return;
    }
    if (head_.plain) {
      sums_.read_rows(query_, head_.feature_row, output_, mass_);
    } else {
      sums_.read(query_, 2.0f, output_, mass_);
    }
    if (!decay || !chunk_.decay.any()) return;
    for (int64_t t = 0; t < kBlock; t++) {
      for (int64_t i = 0; i < head_.row; i++) output_[t * head_.row + i] *= decay[t];
      mass_[t] *= decay[t];
    }
  }

  // Features of `count` queries: in rows where they stand for themselves, else tokens innermost; zeros up to kBlock.
  void read_queries(Rows from, int64_t count) {
    query_ = copy_;
    if (head_.in_place && count == kBlock) {
      query_ = from.data;
    } else if (head_.plain) {
      read_rows(from, count, head_.call.features, copy_, head_.feature_row);
      zero(copy_ + count * head_.feature_row, (kBlock - count) * head_.feature_row);
    } else {
      read_columns(from, count, head_.call.features, copy_, kBlock);
    }
  }

  // What the chunk itself gives to the queries from `first` on.
  void inside(int64_t shared, int64_t first) {
    const int64_t count = std::min(kBlock, chunk_.size - first), visible = head_.visible(first + kBlock, chunk_.size);
    const float* queries = query_;  // as `read` has left them
    if (head_.local || (head_.plain && !head_.by_dots)) {
      read_columns(head_.of_query(head_.inner_query(), shared, chunk_.start + first), count, head_.inner_width,
                   inner_query_, kBlock);
      queries = inner_query_;
    }
    for (int64_t key = 0; key < visible; key += kKeys) {
      const int64_t keys = std::min(kKeys, visible - key);
      for (int64_t f = 0; f < head_.factors && !head_.by_dots; f++)
        product(head_.call.precision, keys, kBlock, head_.inner_width, inner_keys(f, key),
                {queries + f * head_.inner_width * kBlock, kBlock}, {weights_ + f * kScores, kBlock}, false);
      if (head_.by_dots) scores_by_dots(head_, first, chunk_.size, visible, query_, folder_.x(), weights_);
      for (int64_t j = 0; j < keys; j++) weigh(first, key + j, weights_ + j * kBlock);
      const Right values{chunk_.values + key * head_.row, head_.row};
      if (head_.call.precision == kBfloat16 || head_.seen_by_tile(first, key, keys, chunk_.size) == keys) {
        product(head_.call.precision, kBlock, head_.row, keys, {weights_, 1, kBlock}, values, {output_, head_.row}, true);
      } else {
        for (int64_t m = 0; m < kBlock; m += kTileRows)
          product(kTileRows, head_.row, head_.seen_by_tile(first + m, key, keys, chunk_.size), {weights_ + m, 1, kBlock},
                  values, {output_ + m * head_.row, head_.row}, true);
      }
    }
  }

  // One part of the chunk's keys from `key` on.
  Left inner_keys(int64_t factor, int64_t key) {
    if (keys_in_folder_ && head_.plain) return {folder_.x() + key * head_.feature_row, head_.feature_row, 1};
    if (keys_in_folder_) return {folder_.x() + factor * head_.inner_width * folder_.tokens + key, 1, folder_.tokens};
    return {chunk_.inner_keys + factor * chunk_.part + key * head_.inner_row, head_.inner_row, 1};
  }

  // Scores of one key -> its weights, also added to the masses.
  void weigh(int64_t first, int64_t key, float* row) {
    const int64_t from = head_.seen_from(key);
    const int unseen = vectors_before(from, first);
    for (int v = 0; v < unseen; v++) store(row + v * kLanes, Vector{});
    for (int v = unseen; v < kBlockVectors; v++) {
      const int64_t query = first + v * kLanes;
      Vector weight = power_of(load(row + v * kLanes), head_.exponent);
      if (head_.factors == 2) weight *= load(row + kScores + v * kLanes);
      if (chunk_.decay.any() && !head_.local) weight *= decay_between(chunk_.decay, query, key);
      if (from > query) weight = keep(weight, at_least(query, from));
      store(row + v * kLanes, weight);
      store(mass_ + v * kLanes, load(mass_ + v * kLanes) + weight);
    }
  }

  // Where a mass at power 2 is less than rounding can hide in the sums, products of both signs having cancelled, what is
  // missing to that is given to the mean of the values by squares alone, whose weights are not negative: a quotient of
  // noise by noise would leave the range of the values. `decay` is that of each query since the sums.
  void resolve(int64_t count, float offset, const float* decay) {
    if (!head_.call.normalize || head_.call.power != 2 || sums_.empty()) return;
    float squares[kBlock];
    sums_.read_squares(query_, squares);
    for (int64_t t = 0; t < count; t++) {
      const float least = kResolved * squares[t] * (decay ? decay[t] : 1.0f), mass = offset + mass_[t];
      if (!(mass < least)) continue;
      sums_.add_squares(query_ + t, (least - mass) / squares[t], output_ + t * head_.row);
      mass_[t] = least - offset;
    }
  }

  void write(int64_t shared, int64_t token, int64_t count) {
    const LinearAttentionCall& call = head_.call;
    for (int64_t t = 0; t < count; t++) {
      const float mass = mass_[t] + call.offset;
      const float factor = call.normalize ? reciprocal_mass(mass) : 1.0f;
      float* target = head_.of_query(call.output, shared, token + t).data;
      for (int64_t i = 0; i < call.value_width; i++) target[i] = output_[t * head_.row + i] * factor;
      *head_.of_query(call.denominator, shared, token + t).data = mass;
    }
  }

  Head head_;
  Expansion expansion_;
  Sums sums_;
  bool keys_in_folder_;  // the chunk's keys are in the folder, tokens innermost, and nowhere else
  Chunk chunk_;
  Folder folder_;
  Buffer copy_;
  const float* query_;  // the copy, or where a block's queries lie
  Buffer inner_query_, weights_, output_;
  float mass_[kBlock];
};

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int linear_attention_forward(const LinearAttentionCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Forward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
