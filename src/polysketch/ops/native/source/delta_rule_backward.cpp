// The delta rule, backward: gradients of queries, keys, values and strengths from those of the answers.
//
// With u = s e the writes and g the gradients of the answers, tokens in reverse give
//
//   y_t = sum over i >= t of w(q_i, k_t) g_i - sum over i > t of w(k_i, k_t) z_i,   z = s y
//
// by sums over q g^T - k z^T of all later tokens. z is the gradient of the value, y . e that of the strength; those
// of the weights are g_i . u_t and -z_i . u_t. The later side of a pair needs the sums over k u^T once more, in order.
#include "delta_rule.h"

namespace {

// `Tokens` is what stands for the tokens before or behind a block: sums over them, or they themselves.
template <class Tokens>
class DeltaRuleBackward {
 public:
  DeltaRuleBackward(const DeltaRuleCall& call, const Expansion& expansion, int64_t unit)
      : head_(call, unit), expansion_(expansion), key_(call.features * kBlock),
        query_(call.features * kBlock), key_gradient_(call.features * kBlock), query_gradient_(call.features * kBlock),
        written_columns_(call.value_width * kBlock), columns_(call.value_width * kBlock), rows_(kBlock * head_.row),
        given_(kBlock * head_.row), of_error_(kBlock * head_.row), answer_(head_.row),
        weights_(2 * kPairs), joint_(kPairs), of_weight_(kPairs), product_(kPairs), turned_(kPairs) {}

  void run() {
    Tokens later(expansion_, head_.width), earlier(expansion_, head_.width);
    const int64_t blocks = (head_.call.tokens + kBlock - 1) / kBlock;
    for (int64_t block = blocks - 1; block >= 0; block--) backwards(later, block * kBlock);
    for (int64_t block = 0; block < blocks; block++) forwards(earlier, block * kBlock);
  }

 private:
  void backwards(Tokens& later, int64_t first) {
    const int64_t count = head_.count(first);
    read_keys(first, count);
    zero(key_gradient_, head_.call.features * kBlock);
    if (later.empty()) {
      zero(of_error_, kBlock * head_.row);
      zero(masses_, kBlock);
    } else {
      later.read(key_, 1.0f, of_error_, masses_);
      later.read_backward(key_, 1.0f, written_columns_, written_masses(), key_gradient_);
    }
    for (int64_t shared = 0; shared < head_.shared; shared++) from_answers(later, shared, first, count);
    from_writes(first, count);
    give(first, count);
    if (first > 0) later.fold(key_, kBlock, count, negative(rows_), negative_masses(), 1.0f);
  }

  void forwards(Tokens& earlier, int64_t first) {
    const int64_t count = head_.count(first);
    read_keys(first, count);
    if (!earlier.empty()) {
      for (int64_t shared = 0; shared < head_.shared; shared++) {
        read_query(shared, first, count);
        zero(query_gradient_, head_.call.features * kBlock);
        earlier.read_backward(query_, 1.0f, columns_, column_masses(), query_gradient_);
        write_columns(query_gradient_, kBlock, count, head_.call.features,
                      head_.of_query(head_.call.query_gradient, shared, first), true);
      }
      zero(key_gradient_, head_.call.features * kBlock);
      read_columns(head_.of_key(head_.call.value_gradient, first), count, head_.call.value_width, columns_, kBlock);
      for (int64_t i = 0; i < head_.call.value_width * kBlock; i += kLanes) store(columns_ + i, -load(columns_ + i));
      earlier.read_backward(key_, 1.0f, columns_, column_masses(), key_gradient_);
      write_columns(key_gradient_, kBlock, count, head_.call.features, head_.of_key(head_.call.key_gradient, first),
                    true);
    }
    if (first + kBlock >= head_.call.tokens) return;
    head_.read_values(head_.of_key(head_.call.errors, first), count, rows_, masses_);
    scale_by_strength(first, count);
    earlier.fold(key_, kBlock, count, rows_, masses_, 1.0f);
  }

  // Keys, and what their tokens wrote.
  void read_keys(int64_t first, int64_t count) {
    read_columns(head_.of_key(head_.call.key, first), count, head_.call.features, key_, kBlock);
    read_columns(head_.of_key(head_.call.errors, first), count, head_.call.value_width, written_columns_, kBlock);
    const Rows strengths = head_.of_key(head_.call.strength, first);
    for (int64_t i = 0; i < head_.call.value_width; i++)
      for (int64_t t = 0; t < count; t++) written_columns_[i * kBlock + t] *= strengths.at(t)[0];
  }

  void read_query(int64_t shared, int64_t first, int64_t count) {
    read_columns(head_.of_query(head_.call.query, shared, first), count, head_.call.features, query_, kBlock);
    read_columns(head_.of_query(head_.call.output_gradient, shared, first), count, head_.call.value_width, columns_,
                 kBlock);
  }

  // What the queries of one head give to the writes of the block, and to all weights between the two.
  void from_answers(Tokens& later, int64_t shared, int64_t first, int64_t count) {
    read_query(shared, first, count);
    head_.read_values(head_.of_query(head_.call.output_gradient, shared, first), count, given_, given_masses_);
    weigh(query_);
    keep_later(joint_, false);
    product(kBlock, head_.row, count, {joint_, kBlock, 1}, {given_, head_.row}, {of_error_, head_.row}, true);
    for (int64_t key = 0; key < kBlock && head_.has_mass; key++)
      masses_[key] += dot(joint_ + key * kBlock, given_masses_, kBlock);
    zero(query_gradient_, head_.call.features * kBlock);
    of_weights(columns_, false);
    spread(query_, query_gradient_);
    write_columns(query_gradient_, kBlock, count, head_.call.features,
                  head_.of_query(head_.call.query_gradient, shared, first), false);
    if (first > 0) later.fold(query_, kBlock, count, given_, given_masses_, 1.0f);
  }

  // Solves the block's own system, last token first; then `rows_` and `row_masses_` hold z.
  void from_writes(int64_t first, int64_t count) {
    const Rows strengths = head_.of_key(head_.call.strength, first);
    weigh(key_);
    zero(row_masses_, kBlock);
    for (int64_t t = count - 1; t >= 0; t--) {
      float *of_error = of_error_ + t * head_.row, *of_value = rows_ + t * head_.row;
      const float* weights = joint_ + t * kBlock + t + 1;
      const int64_t behind = count - 1 - t;
      const float strength = strengths.at(t)[0];
      product(1, head_.row, behind, {weights, 0, 1}, {of_value + head_.row, head_.row}, {answer_, head_.row}, false);
      for (int64_t i = 0; i < head_.row; i += kLanes) {
        const Vector left = load(of_error + i) - load(answer_ + i);
        store(of_error + i, left);
        store(of_value + i, left * strength);
      }
      if (!head_.has_mass) continue;
      masses_[t] -= dot(weights, row_masses_ + t + 1, behind);
      row_masses_[t] = masses_[t] * strength;
    }
  }

  // Gradients of values and strengths, and of keys as far as this block and later ones make them.
  void give(int64_t first, int64_t count) {
    head_.write_values(rows_, row_masses_, count, head_.of_key(head_.call.value_gradient, first));
    head_.read_values(head_.of_key(head_.call.errors, first), count, given_, given_masses_);
    const Rows of_strength = head_.of_key(head_.call.strength_gradient, first);
    for (int64_t t = 0; t < count; t++) {
      const float mass = head_.has_mass ? masses_[t] * given_masses_[t] : 0.0f;
      of_strength.at(t)[0] = dot(of_error_ + t * head_.row, given_ + t * head_.row, head_.row) + mass;
    }
    read_columns(head_.of_key(head_.call.value_gradient, first), count, head_.call.value_width, columns_, kBlock);
    of_weights(columns_, true);
    for (int64_t i = 0; i < kPairs; i += kLanes) store(of_weight_ + i, -load(of_weight_ + i));
    spread(key_, key_gradient_);
    write_columns(key_gradient_, kBlock, count, head_.call.features, head_.of_key(head_.call.key_gradient, first),
                  false);
  }

  // Weights of the block's keys for `queries`, [key][query]: each factor's, and their product.
  void weigh(const float* queries) {
    head_.weigh(key_, queries, weights_);
    if (head_.call.factors == 2) {
      multiply(weights_, weights_ + kPairs, joint_, kPairs);
    } else {
      std::copy(static_cast<float*>(weights_), weights_ + kPairs, static_cast<float*>(joint_));
    }
  }

  // Gradients of the weights, [key][query]: products of what keys wrote and what queries are given.
  void of_weights(const float* given_columns, bool strictly) {
    product(kBlock, kBlock, head_.call.value_width, {written_columns_, 1, kBlock}, {given_columns, kBlock},
            {of_weight_, kBlock}, false);
    keep_later(of_weight_, strictly);
  }

  // From gradients of the weights, whose factors `weigh` has made, to those of keys and queries: added.
  void spread(const float* queries, float* query_gradient) {
    for (int64_t f = 0; f < head_.call.factors; f++) {
      const int64_t at = f * head_.part * kBlock;
      const float* gradient = of_weight_;
      if (head_.call.factors == 2) {
        multiply(of_weight_, weights_ + (1 - f) * kPairs, product_, kPairs);
        gradient = product_;
      }
      for (int64_t j = 0; j < kBlock; j++)
        for (int64_t i = 0; i < kBlock; i++) turned_[i * kBlock + j] = gradient[j * kBlock + i];
      product(head_.part, kBlock, kBlock, {key_ + at, kBlock, 1}, {gradient, kBlock}, {query_gradient + at, kBlock},
              true);
      product(head_.part, kBlock, kBlock, {queries + at, kBlock, 1}, {turned_, kBlock}, {key_gradient_ + at, kBlock},
              true);
    }
  }

  // Errors -> writes, in `rows_` and `masses_`.
  void scale_by_strength(int64_t first, int64_t count) {
    const Rows strengths = head_.of_key(head_.call.strength, first);
    for (int64_t t = 0; t < count; t++) {
      const float strength = strengths.at(t)[0];
      for (int64_t i = 0; i < head_.row; i++) rows_[t * head_.row + i] *= strength;
      masses_[t] *= strength;
    }
  }

  float* negative(float* rows) {
    for (int64_t i = 0; i < kBlock * head_.row; i += kLanes) store(rows + i, -load(rows + i));
    return rows;
  }

  float* negative_masses() {
    for (float& mass : row_masses_) mass = -mass;
    return row_masses_;
  }

  // The last row of columns, where the last column travels by itself; else zeros.
  const float* last_of(const float* columns) const {
    return head_.has_mass ? columns + head_.width * kBlock : zeros_;
  }
  const float* written_masses() const { return last_of(written_columns_); }
  const float* column_masses() const { return last_of(columns_); }

  DeltaHead head_;
  const Expansion& expansion_;
  Buffer key_, query_, key_gradient_, query_gradient_, written_columns_, columns_, rows_, given_, of_error_, answer_,
      weights_, joint_, of_weight_, product_, turned_;
  float masses_[kBlock], given_masses_[kBlock], row_masses_[kBlock];
  const float zeros_[kBlock] = {};
};

template <class Tokens>
void for_units(const DeltaRuleCall& call, const Expansion& expansion, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; unit++) DeltaRuleBackward<Tokens>(call, expansion, unit).run();
}

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int delta_rule_backward(const DeltaRuleCall* call, int64_t first, int64_t last) {
  try {
    const Expansion expansion(call->features, 1, call->factors);
    // Of later tokens there are two for each: its query and its key. Their answers and gradients are read, and those of
    // earlier tokens twice.
    if (are_few(*call, expansion, 7, 5, 3)) for_units<KeptTokens>(*call, expansion, first, last);
    else for_units<Sums>(*call, expansion, first, last);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
