// Decoding: the next token of every row against a state that moves on in place, in the state's public layout.
#include "half.h"
#include "linear_attention_extend.h"
#include "product.h"

#include <type_traits>
#include <vector>

constexpr int64_t kTile = 16;  // polysketch/ops/linear/packing.py

namespace {

// One key head of one batch row, whose sums are kept as `Stored`. All is computed in float32, and sums are rounded once.
template <class Stored>
class Step {
 public:
  Step(const ExtendCall& call, int64_t unit)
      : call_(call), batch_(unit / call.key_heads), head_(unit % call.key_heads),
        row_(call.rows ? call.rows[batch_] : batch_), shared_(call.heads / call.key_heads),
        padded_(call.power == 2 ? round_up(call.features, kTile) : call.features), sums_(sums_of(call.sums)),
        normalizer_(kept(call.normalizer)), open_features_(kept(call.state_features)),
        open_value_(kept(call.state_value)), open_key_(kept(call.state_key)),
        open_log_decay_(kept(call.state_log_decay)), x_(padded_, 0.0f), numerator_(call.value_width),
        sums_row_(call.value_width) {}

  void run() {
    if (call_.chunk == 0) {
      const float decay = call_.log_decay ? *call_.log_decay.at(batch_, head_, 0) : 0.0f;
      fold_token(decay);
      for (int64_t query = 0; query < shared_; query++) answer(query, 0, 1.0f);
      return;
    }
    const int64_t slot = call_.position[batch_] % call_.chunk;
    open(slot);
    float decay = 0;
    for (int64_t t = 0; t <= slot && call_.log_decay; t++) decay += open_log_decay_[t];
    for (int64_t query = 0; query < shared_; query++) answer(query, slot + 1, std::exp(decay));
    if (slot + 1 == call_.chunk) fold_chunk();
  }

 private:
  // Writes the token into its slot of the open chunk.
  void open(int64_t slot) {
    copy(call_.key, call_.features, open_features_ + slot * call_.features);
    copy(call_.value, call_.value_width, open_value_ + slot * call_.value_width);
    copy(call_.local_key, call_.local_width, open_key_ + slot * call_.local_width);
    if (call_.log_decay) open_log_decay_[slot] = *call_.log_decay.at(batch_, head_, 0);
  }

  void copy(const Tensor& from, int64_t width, float* to) const {
    const float* source = from.at(batch_, head_, 0);
    std::copy(source, source + width, to);
  }

  // The output of one query head: from the sums, times `decay`, and from `opened` tokens of the open chunk.
  void answer(int64_t query, int64_t opened, float decay) {
    const int64_t head = head_ * shared_ + query;
    std::fill(numerator_.begin(), numerator_.end(), 0.0f);
    load_features(call_.query.at(batch_, head, 0));
    float mass = 0;
    for_expansion(2.0f, [&](int64_t row, float weight) {
      add_sums(weight, row);
      mass += weight * normalizer_[row];
    });
    for (float& x : numerator_) x *= decay;
    mass *= decay;
    for (int64_t t = 0; t < opened; t++) {
      const float* local_query = call_.local_query.at(batch_, head, 0);
      const float score = dot(local_query, open_key_ + t * call_.local_width, call_.local_width);
      const float weight = power_of_scalar(score, call_.degree);
      add_scaled(weight, open_value_ + t * call_.value_width, numerator_.data(), call_.value_width);
      mass += weight;
    }
    mass += call_.offset;
    if (call_.normalize && call_.power == 2) mass = resolve(mass, decay);
    const float factor = call_.normalize ? reciprocal_mass(mass) : 1.0f;
    float* output = call_.output.at(batch_, head, 0);
    for (int64_t i = 0; i < call_.value_width; i++) output[i] = numerator_[i] * factor;
    *call_.denominator.at(batch_, head, 0) = mass;
  }

  // A mass that the sums cannot resolve, with what it lacks, and the values of that (see linear_attention.cpp).
  float resolve(float mass, float decay) {
    float squares = 0;
    for (int64_t a = 0; a < call_.features; a++) squares += x_[a] * x_[a] * normalizer_[square(a)];
    const float least = kResolved * squares * decay;
    if (!(mass < least)) return mass;
    const float by = (least - mass) / squares;
    for (int64_t a = 0; a < call_.features; a++)
      add_sums(by * x_[a] * x_[a], square(a));
    return least;
  }

  // The row of the square of a feature, in the public layout: the tile (I, I) comes after those of earlier rows.
  int64_t square(int64_t a) const {
    const int64_t tiles = padded_ / kTile, i = a / kTile, pair = i * tiles - i * (i - 1) / 2;
    return (pair * kTile + a % kTile) * kTile + a % kTile;
  }

  // Folds the token into the sums, decayed first: where there is no local part.
  void fold_token(float log_decay) {
    const float decay = std::exp(log_decay);
    load_features(call_.key.at(batch_, head_, 0));
    const float* value = call_.strength ? written() : call_.value.at(batch_, head_, 0);
    for_expansion(1.0f, [&](int64_t row, float weight) {
      float* sums = opened(row);
      for (int64_t i = 0; i < call_.value_width; i++) sums[i] = sums[i] * decay + weight * value[i];
      close(row);
      normalizer_[row] = normalizer_[row] * decay + weight;
    });
    *kept(call_.log_decay_total) += log_decay;
  }

  // By the delta rule: the share `strength` of what the sums do not answer the key with yet.
  const float* written() {
    const float* value = call_.value.at(batch_, head_, 0);
    const float strength = *call_.strength.at(batch_, head_, 0);
    std::fill(numerator_.begin(), numerator_.end(), 0.0f);
    for_expansion(1.0f, [&](int64_t row, float weight) {
      add_sums(weight, row);
    });
    for (int64_t i = 0; i < call_.value_width; i++) numerator_[i] = strength * (value[i] - numerator_[i]);
    return numerator_.data();
  }

  // Folds the whole open chunk and empties it.
  void fold_chunk() {
    const int64_t chunk = call_.chunk, row = padded(call_.value_width);
    float total = 0;
    for (int64_t t = 0; t < chunk; t++) total += open_log_decay_[t];
    std::vector<float> factor(chunk);
    float since = 0;
    for (int64_t t = 0; t < chunk; t++) factor[t] = std::exp(total - (since += open_log_decay_[t]));
    Buffer x(padded_ * chunk), values(chunk * row), products(kTile * chunk), added(kTile * row);
    zero(x, padded_ * chunk);
    read_columns({open_features_, call_.features}, chunk, call_.features, x, chunk);
    read_rows({open_value_, call_.value_width}, chunk, call_.value_width, values, row, factor.data());
    const float carried = std::exp(total);
    for_row_groups([&](int64_t first, int64_t rows, int64_t left, int64_t right) {
      for (int64_t i = 0; i < rows; i++) {
        const float *b = x + (right + i) * chunk, *a = left < 0 ? nullptr : x + left * chunk;
        for (int64_t t = 0; t < chunk; t++) products[i * chunk + t] = a ? a[t] * b[t] : b[t];
        normalizer_[first + i] = normalizer_[first + i] * carried + dot(products + i * chunk, factor.data(), chunk);
      }
      product(rows, row, chunk, {products, chunk, 1}, {values, row}, {added, row}, false);
      for (int64_t i = 0; i < rows; i++) {
        float* sums = opened(first + i);
        for (int64_t j = 0; j < call_.value_width; j++) sums[j] = sums[j] * carried + added[i * row + j];
        close(first + i);
      }
    });
    *kept(call_.log_decay_total) += total;
    zero(open_features_, chunk * call_.features);
    zero(open_value_, chunk * call_.value_width);
    zero(open_key_, chunk * call_.local_width);
    zero(open_log_decay_, chunk);
  }

  // Rows of the expansion that share their left factor x[left], or have none (-1): first row, rows, left, first right.
  template <class Work>
  void for_row_groups(Work work) const {
    if (call_.factors == 2) {
      const int64_t width = call_.features / 2;
      for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < width; j += kTile) work(i * width + j, std::min(kTile, width - j), i, width + j);
      return;
    }
    if (call_.power == 1) {
      for (int64_t first = 0; first < padded_; first += kTile)
        work(first, std::min(kTile, padded_ - first), int64_t{-1}, first);
      return;
    }
    int64_t row = 0;
    for (int64_t i = 0; i < padded_; i += kTile)
      for (int64_t j = i; j < padded_; j += kTile)
        for (int64_t a = 0; a < kTile; a++, row += kTile) work(row, kTile, i + a, j);
  }

  // work(row, weight) for every row of the expansion of x_; at power 2 products of two different tiles count `pairs`
  // times.
  template <class Work>
  void for_expansion(float pairs, Work work) const {
    for_row_groups([&](int64_t first, int64_t rows, int64_t left, int64_t right) {
      const bool once = call_.power == 1 || left / kTile == right / kTile;
      const float by = left < 0 ? 1.0f : x_[left] * (once ? 1.0f : pairs);
      for (int64_t i = 0; i < rows; i++) work(first + i, by * x_[right + i]);
    });
  }

  void load_features(const float* from) { std::copy(from, from + call_.features, x_.begin()); }

  static float power_of_scalar(float x, int64_t exponent) {
    float result = 1.0f;
    for (; exponent > 0; exponent >>= 1, x *= x)
      if (exponent & 1) result *= x;
    return result;
  }


  // numerator += weight times a row of the sums.
  void add_sums(float weight, int64_t row) {
    add_scaled(weight, opened(row), numerator_.data(), call_.value_width);
  }

  // A row of the sums in float32: itself, or a copy in the caches, which `close` puts back.
  float* opened(int64_t row) {
    Stored* sums = sums_ + row * call_.value_width;
    if constexpr (std::is_same_v<Stored, float>) return sums;
    else {
      convert(sums, sums_row_.data(), call_.value_width);
      return sums_row_.data();
    }
  }
  void close(int64_t row) {
    if constexpr (!std::is_same_v<Stored, float>)
      convert(sums_row_.data(), sums_ + row * call_.value_width, call_.value_width);
  }

  // Strides count numbers, of whatever size.
  Stored* sums_of(const Tensor& tensor) const {
    return reinterpret_cast<Stored*>(tensor.data) + row_ * tensor.batch + head_ * tensor.head;
  }

  // What the state has of this key head.
  float* kept(const Tensor& tensor) const { return tensor.at(row_, head_, 0); }

  const ExtendCall& call_;
  int64_t batch_, head_, row_, shared_, padded_;
  Stored* sums_;
  float *normalizer_, *open_features_, *open_value_, *open_key_, *open_log_decay_;
  std::vector<float> x_, numerator_, sums_row_;
};

template <class Stored>
void extend(const ExtendCall& call, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; unit++) Step<Stored>(call, unit).run();
}

}  // namespace

extern "C" int linear_attention_extend(const ExtendCall* call, int64_t first, int64_t last) {
  try {
    if (call->kind == 0) extend<float>(*call, first, last);
    else if (call->kind == 1) extend<Bfloat16>(*call, first, last);
    else extend<Float16>(*call, first, last);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
