// The gradient of the low-rank polynomial sketch. Linear maps are made again; a factor's gradient is that of the output
// times the product of the others, those before it and those behind it.
#include "low_rank_sketch.h"

namespace {

class Backward {
 public:
  Backward(const LowRankSketchCall& call, int64_t number)
      : call_(call), unit_(call, number), gradients_(call.factor_gradients + number * call.rank * call.degree * call.inputs * call.row),
        maps_(call.degree * kStrip), behind_(call.degree * kStrip), gradient_(kStrip), before_(kStrip), of_map_(kStrip),
        x_gradient_(kTokens * call.input_row) {
    zero(maps_, call.degree * kStrip);  // also behind the last feature, where nothing is written
    zero(behind_, call.degree * kStrip);
  }

  void run() {
    unit_.for_blocks([&](int64_t batch, int64_t head, int64_t token, int64_t count) {
      const Rows x = rows_of(call_.x, batch, head, token), upstream = rows_of(call_.output_gradient, batch, head, token);
      zero(x_gradient_, kTokens * call_.input_row);
      unit_.for_strips([&](int64_t first, int64_t width, int64_t whole) {
        read_rows({upstream.data + first, upstream.token}, count, width, gradient_, kStripFeatures);
        for (int64_t term = 0; term < call_.rank; term++) through_term(x, count, first, width, whole, term);
      });
      write_rows(x_gradient_, call_.input_row, count, call_.inputs, rows_of(call_.x_gradient, batch, head, token), false);
    });
  }

 private:
  void through_term(Rows x, int64_t count, int64_t first, int64_t width, int64_t whole, int64_t term) {
    const int64_t degree = call_.degree;
    for (int64_t number = 0; number < degree; number++)
      unit_.linear_map(x, count, whole, unit_.columns(term, number, first), map(number));
    for (int64_t number = degree - 2; number >= 0; number--) {  // behind(degree - 1) would be one
      std::copy_n(map(number + 1), count * kStripFeatures, behind(number));
      if (number < degree - 2) multiply(behind(number), behind(number + 1), count);
    }
    std::copy_n(static_cast<const float*>(gradient_), count * kStripFeatures, static_cast<float*>(before_));
    for (int64_t number = 0; number < degree; number++) {
      std::copy_n(static_cast<const float*>(before_), count * kStripFeatures, static_cast<float*>(of_map_));
      if (number < degree - 1) multiply(of_map_, behind(number), count);
      through_map(x, count, first, width, whole, term, number);
      multiply(before_, map(number), count);
    }
  }

  // Adds what the gradient of one linear map gives to those of x and of the factor.
  void through_map(Rows x, int64_t count, int64_t first, int64_t width, int64_t whole, int64_t term, int64_t number) {
    product(count, call_.input_row, width, {of_map_, kStripFeatures, 1}, unit_.rows(term, number, first),
            {x_gradient_, call_.input_row}, true);
    float* factor = gradients_ + unit_.factor(term, number) * call_.inputs * call_.row + first;
    product(call_.inputs, whole, count, {x.data, 1, x.token}, {of_map_, kStripFeatures}, {factor, call_.row}, true);
  }

  float* map(int64_t number) { return maps_ + number * kStrip; }
  float* behind(int64_t number) { return behind_ + number * kStrip; }

  const LowRankSketchCall& call_;
  SketchUnit unit_;
  float* gradients_;
  Buffer maps_, behind_;                       // [degree][kTokens][kStripFeatures]
  Buffer gradient_, before_, of_map_;          // [kTokens][kStripFeatures]
  Buffer x_gradient_;                          // [kTokens][input_row]
};

}  // namespace

// The units first..last. Returns 0, or 1 where memory ran out.
extern "C" int low_rank_sketch_backward(const LowRankSketchCall* call, int64_t first, int64_t last) {
  try {
    for (int64_t unit = first; unit < last; unit++) Backward(*call, unit).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
