// The low-rank polynomial sketch, forward: LLOPS, section 3.2.
#include "low_rank_sketch.h"

namespace {

class Forward {
 public:
  Forward(const LowRankSketchCall& call, int64_t number)
      : call_(call), unit_(call, number), term_(kStrip), factor_(kStrip), total_(kStrip) {
    zero(factor_, kStrip);  // also behind the last feature, where nothing is written
    zero(term_, kStrip);
    zero(total_, kStrip);
  }

  void run() {
    unit_.for_blocks([&](int64_t batch, int64_t head, int64_t token, int64_t count) {
      const Rows x = rows_of(call_.x, batch, head, token), output = rows_of(call_.output, batch, head, token);
      unit_.for_strips([&](int64_t first, int64_t width, int64_t whole) {
        for (int64_t term = 0; term < call_.rank; term++) add_term(x, count, first, whole, term);
        write_rows(total_, kStripFeatures, count, width, {output.data + first, output.token}, false);
      });
    });
  }

 private:
  void add_term(Rows x, int64_t count, int64_t first, int64_t whole, int64_t term) {
    float* to = term ? term_ : total_;
    unit_.linear_map(x, count, whole, unit_.columns(term, 0, first), to);
    for (int64_t number = 1; number < call_.degree; number++) {
      unit_.linear_map(x, count, whole, unit_.columns(term, number, first), factor_);
      multiply(to, factor_, count);
    }
    if (term) add_scaled(1.0f, term_, total_, count * kStripFeatures);
  }

  const LowRankSketchCall& call_;
  SketchUnit unit_;
  Buffer term_, factor_, total_;  // [kTokens][kStripFeatures]
};

}  // namespace

// The units first..last. Returns 0, or 1 where memory ran out.
extern "C" int low_rank_sketch_forward(const LowRankSketchCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Forward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
