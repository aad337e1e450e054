// One call of exact polynomial attention, and the weights of pairs. The structure is mirrored in
// polysketch/ops/polynomial/native.py.
#pragma once

#include "seen_pairs.h"

struct PolynomialAttentionCall : PairsCall {
  int64_t degree, terms;      // of a power; or, where terms is not 0, the coefficients of what is squared
  const float* coefficients;  // the constant first
  float offset;               // added to the sums of weights
  Tensor output, denominator;
  // Backward only: the gradient of the output, what the normalisation of a row takes back from all its weights, and
  // where gradients of the inputs go; of the coefficients each unit has sums of its own, unless it is null.
  Tensor output_gradient, row_term, query_gradient, key_gradient, value_gradient;
  double* moments;  // (units, terms)
};

// 1 / denominator; zero for a row without weight, NaN where it overflowed: a finite sum over it would be a wrong zero.
static inline float reciprocal_denominator(float denominator) {
  return std::isinf(denominator) ? NAN : reciprocal_mass(denominator);
}

// score^degree; kDegree is 0 where it is not known here.
//
// Backward a query is first divided by about denominator^(1 / degree), so that no power overflows and no gradient is
// lost by a huge denominator: by a power of two, which rounds nothing.
template <int kDegree>
class Power {
 public:
  explicit Power(const PolynomialAttentionCall& call, double* = nullptr)
      : degree_(kDegree ? kDegree : static_cast<int>(call.degree)) {}

  Vector of(Vector score) const { return of_power(score, degree_); }

  // Of query t: factors on the query and on the gradient of its output.
  void read(int64_t, float denominator, float& of_query, float& of_gradient) {
    int exponent;
    const float mantissa = std::frexp(denominator, &exponent);
    const int shrink = exponent >= 0 ? exponent / degree_ : -((degree_ - 1 - exponent) / degree_);
    of_query = std::ldexp(1.0f, -shrink);
    const float rest = std::ldexp(mantissa, exponent - degree_ * shrink);
    of_gradient = std::fabs(denominator) < FLT_MIN ? 0.0f : reciprocal_denominator(rest);
  }

  // Scores -> weights, gradients of the weights -> gradients of the scores; of queries from v on. `first` tells whether
  // these pairs are met for the first time.
  void weigh(int64_t, float* score, float* gradient, bool) {
    const Vector x = load(score), slope = of_power(x, degree_ - 1);
    store(score, slope * x);
    store(gradient, slope * load(gradient) * static_cast<float>(degree_));
  }

  static constexpr bool kZeroOfZero = true;  // the weight of a score of zero

 private:
  static Vector of_power(Vector x, int exponent) {
    if (exponent == 2) return x * x;
    if (exponent == 4) return (x * x) * (x * x);
    if (exponent == 3) return x * x * x;
    return power_of(x, exponent);
  }

  const int degree_;
};

// The square of a polynomial. Backward its coefficients are divided by the root of the denominator.
class SquaredPolynomial {
 public:
  explicit SquaredPolynomial(const PolynomialAttentionCall& call, double* moments = nullptr)
      : terms_(call.terms), coefficients_(call.coefficients), moments_(moments) {}

  Vector of(Vector score) const {
    const Vector root = polynomial(score);
    return root * root;
  }

  void read(int64_t query, float denominator, float& of_query, float& of_gradient) {
    of_query = of_gradient = 1.0f;
    shrink_[query] = std::sqrt(reciprocal_denominator(denominator));
  }

  void weigh(int64_t v, float* score, float* gradient, bool first) {
    const Vector x = load(score), shrink = load(shrink_ + v), root = polynomial(x) * shrink;
    Vector slope = splat(0.0f);
    for (int64_t i = terms_ - 1; i > 0; i--) slope = slope * x + static_cast<float>(i) * coefficients_[i];
    const Vector change = 2.0f * root * load(gradient);
    store(score, root * root);
    store(gradient, change * (slope * shrink));
    if (moments_ && first) add_moments(x, change * shrink);
  }

  static constexpr bool kZeroOfZero = false;

 private:
  Vector polynomial(Vector x) const {
    Vector result = splat(coefficients_[terms_ - 1]);
    for (int64_t i = terms_ - 2; i >= 0; i--) result = result * x + coefficients_[i];
    return result;
  }

  // The sums of change * score^i.
  void add_moments(Vector x, Vector change) {
    for (int64_t i = 0; i < terms_; i++, change *= x) moments_[i] += sum_of(change);
  }

  int64_t terms_;
  const float* coefficients_;
  double* moments_;
  float shrink_[kQueries];
};

// Calls work(weights of the call's kind), with a power's degree known to the compiler where it is a common one.
template <class Work>
static inline void with_weights(const PolynomialAttentionCall& call, double* moments, Work work) {
  if (call.terms) return work(SquaredPolynomial(call, moments));
  if (call.degree == 2) return work(Power<2>(call));
  if (call.degree == 4) return work(Power<4>(call));
  work(Power<0>(call));
}
