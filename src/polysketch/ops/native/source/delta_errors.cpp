// The delta rule: each value less what the sums before its token say of it, one key head at a time.
//
// 32 tokens at a time read the sums of all tokens before them; among themselves they are taken one after another.
#include "sums.h"

struct DeltaErrorsCall {
  int64_t heads, tokens, features, value_width, factors;
  Tensor key, value, strength, errors;
  const float* sums_in;  // (batch, heads, expansion, value_width), contiguous; null where there are none
};

namespace {

class DeltaErrors {
 public:
  DeltaErrors(const DeltaErrorsCall& call, int64_t unit)
      : call_(call), unit_(unit), batch_(unit / call.heads), head_(unit % call.heads), row_(padded(call.value_width)),
        part_(call.features / call.factors), expansion_(call.features, 1, call.factors),
        sums_(expansion_, call.value_width), key_(call.features * kBlock), weights_(2 * kBlock * kBlock),
        errors_(kBlock * row_), written_(kBlock * row_) {}

  void run() {
    start();
    for (int64_t first = 0; first < call_.tokens; first += kBlock) {
      const int64_t count = std::min(kBlock, call_.tokens - first);
      read_columns(rows(call_.key, first), count, call_.features, key_, kBlock);
      before(first, count);
      weigh(count);
      inside(first, count);
      write_rows(errors_, row_, count, call_.value_width, rows(call_.errors, first), false);
      if (first + kBlock < call_.tokens) sums_.fold(key_, kBlock, count, written_, masses_, 1.0f);
    }
  }

 private:
  Rows rows(const Tensor& x, int64_t token) const { return rows_of(x, batch_, head_, token); }

  void start() {
    if (!call_.sums_in) return;
    const std::vector<float> none(expansion_.size, 0.0f);
    sums_.read_from(call_.sums_in + unit_ * expansion_.size * call_.value_width, none.data());
  }

  // Values less what the sums say.
  void before(int64_t first, int64_t count) {
    read_rows(rows(call_.value, first), count, call_.value_width, errors_, row_);
    if (sums_.empty()) return;
    sums_.read(key_, 1.0f, written_, mass_);
    for (int64_t i = 0; i < count * row_; i += kLanes) store(errors_ + i, load(errors_ + i) - load(written_ + i));
  }

  // Weights between the tokens, [token][token].
  void weigh(int64_t count) {
    for (int64_t f = 0; f < call_.factors; f++) {
      float* part = key_ + f * part_ * kBlock;
      product(count, kBlock, part_, {part, 1, kBlock}, {part, kBlock}, {weights_ + f * kBlock * kBlock, kBlock}, false);
    }
    if (call_.factors == 1) return;
    float* other = weights_ + kBlock * kBlock;
    for (int64_t i = 0; i < count * kBlock; i += kLanes) store(weights_ + i, load(weights_ + i) * load(other + i));
  }

  // Every token's error less what the earlier tokens of the block write.
  void inside(int64_t first, int64_t count) {
    const Rows strengths = rows(call_.strength, first);
    for (int64_t t = 0; t < count; t++) {
      float* error = errors_ + t * row_;
      const float* weights = weights_ + t * kBlock;
      const float strength = strengths.at(t)[0];
      product(1, row_, t, {weights, 0, 1}, {written_, row_}, {error_, row_}, false);
      for (int64_t i = 0; i < row_; i += kLanes) {
        const Vector left = load(error + i) - load(error_ + i);
        store(error + i, left);
        store(written_ + t * row_ + i, left * strength);
      }
    }
  }

  const DeltaErrorsCall& call_;
  int64_t unit_, batch_, head_, row_, part_;
  Expansion expansion_;
  Sums sums_;
  Buffer key_, weights_, errors_, written_;
  Buffer error_{row_};
  float mass_[kBlock], masses_[kBlock] = {};  // of sums of ones, which nothing here asks for
};

}  // namespace

// The heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
extern "C" int delta_errors(const DeltaErrorsCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) DeltaErrors(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
