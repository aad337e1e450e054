// Whether the compiler can be told of instructions for bfloat16, in the middle of a file: GCC, for processors that have
// AVX-512 anyway. Other compilers make products in float32 alone.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11
#define HAS_BFLOAT16_INSTRUCTIONS 1
#else
#define HAS_BFLOAT16_INSTRUCTIONS 0
#endif
