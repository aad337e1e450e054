// The delta rule: each value less what the sums before its token say of it, and what the sums answer to queries.
#include "delta_rule.h"

#include <type_traits>

namespace {

// `Before` is what stands for the tokens before a block: sums over them, or they themselves.
template <class Before>
class DeltaRule {
 public:
  DeltaRule(const DeltaRuleCall& call, const Expansion& expansion, int64_t unit)
      : head_(call, unit), expansion_(expansion), sums_(expansion, head_.width), key_(call.features * kBlock), query_(call.features * kBlock), weights_(2 * kPairs), errors_(kBlock * head_.row),
        written_(kBlock * head_.row), output_(kBlock * head_.row), answer_(head_.row) {}

  void run() {
    start();
    for (int64_t first = 0; first < head_.call.tokens; first += kBlock) {
      const int64_t count = head_.count(first);
      read_columns(head_.of_key(head_.call.key, first), count, head_.call.features, key_, kBlock);
      before(first, count);
      inside(first, count);
      head_.write_values(errors_, error_masses_, count, head_.of_key(head_.call.errors, first));
      for (int64_t shared = 0; shared < head_.shared && head_.call.query; shared++) answer(shared, first, count);
      if (first + kBlock < head_.call.tokens) sums_.fold(key_, kBlock, count, written_, masses_, 1.0f);
    }
  }

 private:
  void start() {
    if constexpr (std::is_same_v<Before, Sums>) read_sums();
  }

  void read_sums() {
    if (!head_.call.sums_in) return;
    const int64_t all = head_.call.value_width;
    const float* from = head_.call.sums_in + head_.unit * expansion_.size * all;
    std::vector<float> sums(expansion_.size * head_.width), masses(expansion_.size, 0.0f);
    for (int64_t k = 0; k < expansion_.size; k++) {
      std::copy(from + k * all, from + k * all + head_.width, sums.data() + k * head_.width);
      if (head_.has_mass) masses[k] = from[k * all + head_.width];
    }
    sums_.read_from(sums.data(), masses.data());
  }

  // Values less what the sums say.
  void before(int64_t first, int64_t count) {
    head_.read_values(head_.of_key(head_.call.value, first), count, errors_, error_masses_);
    if (sums_.empty()) return;
    sums_.read(key_, 1.0f, written_, read_masses_);
    for (int64_t i = 0; i < count * head_.row; i += kLanes) store(errors_ + i, load(errors_ + i) - load(written_ + i));
    for (int64_t t = 0; t < count && head_.has_mass; t++) error_masses_[t] -= read_masses_[t];
  }

  // Every token's error less what the earlier tokens of the block write.
  void inside(int64_t first, int64_t count) {
    const Rows strengths = head_.of_key(head_.call.strength, first);
    weigh(key_);
    zero(masses_, kBlock);
    for (int64_t t = 0; t < count; t++) {
      float *error = errors_ + t * head_.row, *written = written_ + t * head_.row;
      const float* weights = weights_ + t * kBlock;  // of a pair of keys, in either order
      const float strength = strengths.at(t)[0];
      product(1, head_.row, t, {weights, 0, 1}, {written_, head_.row}, {answer_, head_.row}, false);
      for (int64_t i = 0; i < head_.row; i += kLanes) {
        const Vector left = load(error + i) - load(answer_ + i);
        store(error + i, left);
        store(written + i, left * strength);
      }
      if (!head_.has_mass) continue;
      error_masses_[t] -= dot(weights, masses_, t);
      masses_[t] = error_masses_[t] * strength;
    }
  }

  // What the sums answer to the queries of one head, tokens of the block included.
  void answer(int64_t shared, int64_t first, int64_t count) {
    const Rows queries = head_.of_query(head_.call.query, shared, first);
    read_columns(queries, count, head_.call.features, query_, kBlock);
    if (!sums_.empty()) sums_.read(query_, 1.0f, output_, read_masses_);
    weigh(query_);
    keep_later(weights_, false);
    product(kBlock, head_.row, count, {weights_, 1, kBlock}, {written_, head_.row}, {output_, head_.row},
            !sums_.empty());
    if (head_.has_mass) answer_masses();
    head_.write_values(output_, read_masses_, count, head_.of_query(head_.call.output, shared, first));
  }

  void answer_masses() {
    if (sums_.empty()) zero(read_masses_, kBlock);
    for (int64_t key = 0; key < kBlock; key++) add_scaled(masses_[key], weights_ + key * kBlock, read_masses_, kBlock);
  }

  // Weights of the block's keys for `queries`, [key][query].
  void weigh(const float* queries) {
    head_.weigh(key_, queries, weights_);
    if (head_.call.factors == 2) multiply(weights_, weights_ + kPairs, weights_, kPairs);
  }

  DeltaHead head_;
  const Expansion& expansion_;
  Before sums_;
  Buffer key_, query_, weights_, errors_, written_, output_, answer_;
  float error_masses_[kBlock], masses_[kBlock], read_masses_[kBlock];
};

template <class Before>
void for_units(const DeltaRuleCall& call, const Expansion& expansion, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; unit++) DeltaRule<Before>(call, expansion, unit).run();
}

}  // namespace

// The key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int delta_rule(const DeltaRuleCall* call, int64_t first, int64_t last) {
  try {
    const Expansion expansion(call->features, 1, call->factors);
    // Keys and queries read, and tokens are folded. Half of the tokens stand before a block, on average.
    if (are_few(*call, expansion, 3, 1, 1)) for_units<KeptTokens>(*call, expansion, first, last);
    else for_units<Sums>(*call, expansion, first, last);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
