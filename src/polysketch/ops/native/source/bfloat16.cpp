// Which instructions for bfloat16 this processor has, and the products by them.
#include "bfloat16.h"

#include "bfloat16_targets.h"

#if HAS_BFLOAT16_INSTRUCTIONS && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux gives the registers of tiles to processes that ask for them, once.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// That the system keeps registers of AVX-512 is known: this is compiled where PyTorch uses them.
Instructions found() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax >> 5 & 1)) return kPlainVectors;
  __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
  const bool has_tiles = edx >> 22 & 1 && edx >> 24 & 1;  // AMX-BF16, AMX-TILE
  return has_tiles && may_use_tiles() ? kAmx : kAvx512Bf16;
}

}  // namespace
#else
namespace {
Instructions found() { return kPlainVectors; }
}  // namespace
#endif

static Product product_by(int64_t instructions) {
#if HAS_BFLOAT16_INSTRUCTIONS
  if (instructions == kAmx) return product_by_amx;
  if (instructions == kAvx512Bf16) return product_by_avx512_bf16;
#endif
  return product_by_plain_vectors;
}

extern "C" int bfloat16_instructions() {
  static const Instructions instructions = found();
  return instructions;
}

void product_bfloat16(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  static const Product best = product_by(bfloat16_instructions());
  best(rows, width, depth, a, b, c, add);
}

// One product, by some instructions that are there.
extern "C" void bfloat16_product(int64_t instructions, int64_t rows, int64_t depth, int64_t width, int64_t left_row,
                                 int64_t left_step, int64_t right_step, int64_t result_row, int64_t add,
                                 const float* left, const float* right, float* result, float* lost) {
  product_by(instructions)(rows, width, depth, {left, left_row, left_step}, {right, right_step},
                           {result, result_row, lost}, add);
}
