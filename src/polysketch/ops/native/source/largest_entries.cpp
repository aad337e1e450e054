// The entries of largest size of every row, the largest first.
#include <vector>

#include "memory.h"

struct LargestEntriesCall {
  int64_t width, count;
  const float* rows;  // (rows, width), contiguous
  int32_t* entries;   // (rows, count)
};

namespace {

// An entry's size, whose bits are in the order of the numbers, and behind it its place: of equals the first is larger.
// So the largest key is a maximum over whole vectors, without branches. NaN counts as the largest.
uint64_t key_of(float x, int64_t place) {
  const float size = std::abs(x);
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~place);
}

void find(const float* row, int64_t width, int64_t count, uint64_t* keys, int32_t* entries) {
  for (int64_t i = 0; i < width; i++) keys[i] = key_of(row[i], i);
  for (int64_t found = 0; found < count; found++) {
    uint64_t largest = 0;
    for (int64_t i = 0; i < width; i++) largest = keys[i] > largest ? keys[i] : largest;
    entries[found] = static_cast<int32_t>(~static_cast<uint32_t>(largest));
    keys[entries[found]] = 0;
  }
}

}  // namespace

// The rows first..last. Returns 0, or 1 where memory ran out.
extern "C" int largest_entries(const LargestEntriesCall* call, int64_t first, int64_t last) {
  try {
    std::vector<uint64_t> keys(call->width);
    for (int64_t row = first; row < last; row++)
      find(call->rows + row * call->width, call->width, call->count, keys.data(), call->entries + row * call->count);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
