// Products of bfloat16 numbers by AMX: a tile is 16 rows of 16 pairs, or 16 x 16 sums. 32 x 32 sums are made at once, of
// two tiles of either operand.
#include "bfloat16_targets.h"

#if HAS_BFLOAT16_INSTRUCTIONS
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#include "bfloat16_avx512.h"

namespace {

constexpr int64_t kTile = 16;

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3 are sums, 4 and 5 of the left operand, 6 and 7 of the right one. They are free again at the end.
class Amx : public Avx512Bf16 {
 public:
  Amx() {
    const Configuration all_whole;
    _tile_loadconfig(&all_whole);
  }
  ~Amx() { _tile_release(); }

  void multiply(int64_t rows, int64_t columns, int64_t pairs, const Panels& panels, Result c, bool add) const {
    for (int64_t n = 0; n < columns; n += 2 * kTile)
      for (int64_t m = 0; m < rows; m += 2 * kTile) {
        const bool two_down = rows - m > kTile, two_across = columns - n > kTile;
        const float *left = panels.left + m * pairs, *right = panels.right + n;
        alignas(64) float sums[4 * kTile * kTile];
        if (two_down && two_across) sum<2, 2>(pairs, left, right, sums);
        if (two_down && !two_across) sum<2, 1>(pairs, left, right, sums);
        if (!two_down && two_across) sum<1, 2>(pairs, left, right, sums);
        if (!two_down && !two_across) sum<1, 1>(pairs, left, right, sums);
        const int64_t place = m * c.row + n;
        write(std::min(2 * kTile, rows - m), std::min(2 * kTile, columns - n), sums,
              {c.data + place, c.row, c.lost ? c.lost + place : nullptr}, add);
      }
  }

 private:
  // sums[row][2 * kTile] of kDown x kAcross tiles.
  template <int kDown, int kAcross>
  static void sum(int64_t pairs, const float* left, const float* right, float* sums) {
    constexpr int kSumsRow = 2 * kTile * sizeof(float);
    const int64_t left_row = pairs * sizeof(float), right_row = kPanelColumns * sizeof(float);
    _tile_zero(0);
    if constexpr (kAcross == 2) _tile_zero(1);
    if constexpr (kDown == 2) _tile_zero(2);
    if constexpr (kDown == 2 && kAcross == 2) _tile_zero(3);
    for (int64_t pair = 0; pair < pairs; pair += kTile) {
      const float* below = right + pair * kPanelColumns;
      _tile_loadd(4, left + pair, left_row);
      _tile_loadd(6, below, right_row);
      if constexpr (kDown == 2) _tile_loadd(5, left + kTile * pairs + pair, left_row);
      if constexpr (kAcross == 2) _tile_loadd(7, below + kTile, right_row);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kAcross == 2) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kDown == 2) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kDown == 2 && kAcross == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kSumsRow);
    if constexpr (kAcross == 2) _tile_stored(1, sums + kTile, kSumsRow);
    if constexpr (kDown == 2) _tile_stored(2, sums + 2 * kTile * kTile, kSumsRow);
    if constexpr (kDown == 2 && kAcross == 2) _tile_stored(3, sums + 2 * kTile * kTile + kTile, kSumsRow);
  }

  static void write(int64_t rows, int64_t columns, const float* sums, Result c, bool add) {
    for (int64_t m = 0; m < rows; m++)
      for (int64_t n = 0; n < columns; n += kLanes) {
        const Vector found = load(sums + m * 2 * kTile + n);
        float* to = c.data + m * c.row + n;
        if (c.lost) {
          add_compensated(to, c.lost + m * c.row + n, found);
        } else {
          store(to, add ? load(to) + found : found);
        }
      }
  }
};

}  // namespace

void product_by_amx(int64_t rows, int64_t width, int64_t depth, Left a, Right b, Result c, bool add) {
  product_of_panels<Amx>(rows, width, depth, a, b, c, add);
}
#endif
