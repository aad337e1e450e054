// Products of matrices by instructions for bfloat16: factors are rounded to it, sums are in float32.
//
//   c[m][n] (+)= sum over k of bfloat16(a[m][k]) bfloat16(b[k][n]),   operands and result as in product.h
//
// Numbers go in pairs along k, two of them in 32 bits: that is what such instructions multiply. Both operands are packed,
// a panel at a time, a row by a column of pairs. Which instructions there are is found at run time; plain vectors do the
// same sum for tests.
#pragma once

#include "product.h"

// Of bfloat16_instructions(), and of ops/native/bfloat16.py.
enum Instructions : int64_t { kPlainVectors = 0, kAvx512Bf16 = 1, kAmx = 2 };

enum Precision : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// By the best instructions of this processor.
void product_bfloat16(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add);

static inline void product(int64_t precision, int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c,
                           bool add) {
  if (precision == kBfloat16) {
    product_bfloat16(rows, width, depth, a, b, c, add);
  } else {
    product(rows, width, depth, a, b, c, add);
  }
}

using Product = void (*)(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add);

// Each in a file of its own, compiled for its instructions.
void product_by_plain_vectors(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add);
void product_by_avx512_bf16(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add);
void product_by_amx(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add);
