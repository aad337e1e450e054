// Memory that is about to be written for the first time.
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Asks for pages of 2 MB in place of 4 KB, for those that lie whole in this memory: a large result then waits for the
// kernel once for 512 pages. Only advice: where it is not taken, nothing changes.
extern "C" void advise_huge_pages(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}
