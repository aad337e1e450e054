// Products of bfloat16 numbers by AVX-512 BF16.
#include "bfloat16_targets.h"

#if HAS_BFLOAT16_INSTRUCTIONS
#pragma GCC target("avx512bf16")
#include "bfloat16_avx512.h"

void product_by_avx512_bf16(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  product_of_panels<Avx512Bf16>(rows, width, depth, a, b, c, add);
}
#endif
