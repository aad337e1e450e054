// Rounding to bfloat16, and products of pairs of such numbers, by instructions of AVX-512 BF16.
//
// A file that includes this is compiled for them from here on; it is called where the processor has them alone.
#pragma once

#include <immintrin.h>

#include "bfloat16_panels.h"

namespace {

struct Avx512Bf16 {
  static Vector pairs(Vector first, Vector second) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);  // the numbers of `first`, then `second`
    return (Vector)_mm512_permutexvar_epi16(in_turn(), (__m512i)both);
  }

  static Vector pairs_in_row(const float* from) {
    return (Vector)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
  }

  static Vector add(Vector sum, float left, Vector right) {
    int32_t bits;
    std::memcpy(&bits, &left, sizeof(bits));
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)right);
  }

  void multiply(int64_t rows, int64_t columns, int64_t pairs, const Panels& panels, Result c, bool add) const {
    product<Avx512Bf16>(rows, columns, pairs, {panels.left, pairs, 1}, {panels.right, kPanelColumns}, c, add);
  }

 private:
  static __m512i in_turn() {
    alignas(64) static constexpr int16_t kPlaces[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_load_si512(kPlaces);
  }
};

}  // namespace
