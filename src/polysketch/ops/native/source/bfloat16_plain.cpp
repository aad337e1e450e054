// Pairs of bfloat16 numbers by plain vectors. Slower than float32: they show what the instructions compute.
#include "bfloat16_panels.h"

namespace {

// To the nearest, ties to even, in the upper half of each lane; what is not a number stays so.
static inline Unsigned rounded(Vector x) {
  const Unsigned bits = (Unsigned)x, none = (Unsigned)(x != x);
  return ((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~none) | (0x7fc00000u & none);
}

struct PlainVectors {
  // The first number of a pair in the lower half.
  static Vector pairs(Vector first, Vector second) {
    return (Vector)((rounded(first) >> 16) | (rounded(second) & 0xffff0000u));
  }

  static Vector pairs_in_row(const float* from) {
    float first[kLanes], second[kLanes];
    for (int i = 0; i < kLanes; i++) first[i] = from[2 * i], second[i] = from[2 * i + 1];
    return pairs(load(first), load(second));
  }

  static Vector add(Vector sum, float left, Vector right) {
    const Unsigned a = (Unsigned)splat_bits(left), b = (Unsigned)right;
    sum += (Vector)(a & 0xffff0000u) * (Vector)(b & 0xffff0000u);
    return sum + (Vector)(a << 16) * (Vector)(b << 16);
  }

  void multiply(int64_t rows, int64_t columns, int64_t pairs, const Panels& panels, Result c, bool add) const {
    product<PlainVectors>(rows, columns, pairs, {panels.left, pairs, 1}, {panels.right, kPanelColumns}, c, add);
  }

 private:
  // The bits of a pair in every lane; no arithmetic, for they may be those of no number.
  static Integers splat_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits - Integers{};
  }
};

}  // namespace

void product_by_plain_vectors(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  product_of_panels<PlainVectors>(rows, width, depth, a, b, c, add);
}
