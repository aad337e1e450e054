// A memory of size x size cells that is addressed by products of two sparse vectors and written by the delta rule, one
// key head at a time, one token after another. The backward pass goes back through the tokens and takes back what they
// wrote.
#include <vector>

#include "memory.h"

struct DeltaMemoryCall {
  int64_t heads, key_heads, tokens, kept, size, value_width;
  Tensor query_cells, query_weights, key_cells, key_weights;  // (batch, heads, tokens, 2 * kept); cells are int32
  Tensor value, strength, recalled, written;
  float* sums;  // (batch, key_heads, size * size, value_width), contiguous, which move on; null: none before or after
  Tensor gradient, of_query, of_key, of_value, of_strength;  // of the backward pass
};

namespace {

// The products of two sparse vectors of one token: where each stands in the memory, and how much it weighs.
class Products {
 public:
  explicit Products(int64_t kept) : kept_(kept), places_(kept * kept), weights_(kept * kept) {}

  void take(const int32_t* cells, const float* weights, int64_t size) {
    factors_ = weights;
    for (int64_t i = 0; i < kept_; i++)
      for (int64_t j = 0; j < kept_; j++) {
        places_[i * kept_ + j] = cells[i] * size + cells[kept_ + j];
        weights_[i * kept_ + j] = weights[i] * weights[kept_ + j];
      }
  }

  // visit(index, place, weight) for every product.
  template <class Visit>
  void each(Visit visit) const {
    for (int64_t p = 0; p < kept_ * kept_; p++) visit(p, places_[p], weights_[p]);
  }

  // Gradients of both vectors' weights, of those of their products; from (kept, kept).
  void differentiate(const float* of_products, float* to) const {
    zero(to, 2 * kept_);
    for (int64_t i = 0; i < kept_; i++)
      for (int64_t j = 0; j < kept_; j++) {
        to[i] += of_products[i * kept_ + j] * factors_[kept_ + j];
        to[kept_ + j] += of_products[i * kept_ + j] * factors_[i];
      }
  }

 private:
  int64_t kept_;
  std::vector<int64_t> places_;
  std::vector<float> weights_;
  const float* factors_ = nullptr;
};

// Rows of values, one a cell; padded to whole vectors, but where they are somebody else's.
class Memory {
 public:
  Memory(const DeltaMemoryCall& call, bool borrows)
      : cells_(call.size * call.size), width_(call.value_width), row_(borrows ? width_ : padded(width_)),
        own_(borrows ? 0 : cells_ * row_), rows_(own_) {}

  // Empty, or what is given: used as it is, or read.
  void start(float* given) {
    given_ = given;
    if (row_ == width_ && given) rows_ = given;
    else if (given) read_rows({given, width_}, cells_, width_, own_, row_);
    else zero(own_, cells_ * row_);
  }

  void give_back() const {
    if (given_ && rows_ != given_) write_rows(own_, row_, cells_, width_, {given_, width_}, false);
  }

  float* row(int64_t place) const { return rows_ + place * row_; }

  // to += by * the sum of the rows of `products` by their weights.
  void read(const Products& products, float by, float* to) const {
    int64_t i = 0;
    for (; i + 4 * kLanes <= row_; i += 4 * kLanes) read_vectors<4>(products, by, i, to);
    for (; i + kLanes <= row_; i += kLanes) read_vectors<1>(products, by, i, to);
    if (i < row_) products.each([&](int64_t, int64_t place, float weight) {
      for (int64_t rest = i; rest < row_; rest++) to[rest] += by * weight * row(place)[rest];
    });
  }

  void write(const Products& products, float by, const float* from) const {
    products.each([&](int64_t, int64_t place, float weight) { add(by * weight, from, row(place)); });
  }

  // to[i] += by * from[i].
  void add(float by, const float* from, float* to) const {
    int64_t i = 0;
    for (; i + kLanes <= row_; i += kLanes) store(to + i, load(to + i) + by * load(from + i));
    for (; i < row_; i++) to[i] += by * from[i];
  }

  float product(const float* a, const float* b) const { return dot(a, b, row_); }

 private:
  // Columns from `first` on; sums stay in registers.
  template <int kVectors>
  void read_vectors(const Products& products, float by, int64_t first, float* to) const {
    Vector sums[kVectors] = {};
    products.each([&](int64_t, int64_t place, float weight) {
      const float* from = row(place) + first;
      for (int v = 0; v < kVectors; v++) sums[v] += weight * load(from + v * kLanes);
    });
    for (int v = 0; v < kVectors; v++) store(to + first + v * kLanes, load(to + first + v * kLanes) + by * sums[v]);
  }

  int64_t cells_, width_, row_;
  float* given_ = nullptr;
  Buffer own_;
  float* rows_;
};

constexpr int64_t kWorthACopy = 64;  // tokens; fewer use the memory that is given where it is

class DeltaMemory {
 public:
  explicit DeltaMemory(const DeltaMemoryCall& call)
      : call_(call), group_(call.heads / call.key_heads), row_(padded(call.value_width)), key_(call.kept),
        query_(call.kept), memory_(call, call.sums && call.tokens <= kWorthACopy), value_(row_), written_(row_),
        gradient_(row_), of_written_(row_), of_products_(call.kept * call.kept) {}

  void start(int64_t unit) {
    batch_ = unit / call_.key_heads;
    head_ = unit % call_.key_heads;
    memory_.start(call_.sums ? call_.sums + unit * call_.size * call_.size * call_.value_width : nullptr);
  }

  void forward() {
    for (int64_t t = 0; t < call_.tokens; t++) {
      take_key(t);
      const float strength = *call_.strength.at(batch_, head_, t);
      read(call_.value, head_, t, value_);
      memory_.read(key_, -1.0f, value_);
      for (int64_t i = 0; i < row_; i++) written_[i] = strength * value_[i];
      if (strength != 0.0f) memory_.write(key_, 1.0f, written_);
      write(written_, call_.written, head_, t);
      for (int64_t head = head_ * group_; head < (head_ + 1) * group_; head++) {
        take_query(head, t);
        zero(value_, row_);
        memory_.read(query_, 1.0f, value_);
        write(value_, call_.recalled, head, t);
      }
    }
    memory_.give_back();
  }

  // `gradients` are of the loss by the memory as it is after a token.
  void backward(Memory& gradients) {
    gradients.start(nullptr);
    for (int64_t t = 0; t < call_.tokens; t++) {
      take_key(t);
      read(call_.written, head_, t, written_);
      memory_.write(key_, 1.0f, written_);
    }
    for (int64_t t = call_.tokens; t-- > 0;) {
      for (int64_t head = head_ * group_; head < (head_ + 1) * group_; head++) read_backward(head, t, gradients);
      write_backward(t, gradients);
    }
  }

 private:
  void take_key(int64_t t) { take(key_, call_.key_cells, call_.key_weights, head_, t); }
  void take_query(int64_t head, int64_t t) { take(query_, call_.query_cells, call_.query_weights, head, t); }

  void take(Products& products, const Tensor& cells, const Tensor& weights, int64_t head, int64_t t) const {
    products.take(reinterpret_cast<const int32_t*>(cells.at(batch_, head, t)), weights.at(batch_, head, t), call_.size);
  }

  void read(const Tensor& from, int64_t head, int64_t t, float* to) const {
    read_rows(rows_of(from, batch_, head, t), 1, call_.value_width, to, row_);
  }

  void write(const float* from, const Tensor& to, int64_t head, int64_t t) const {
    write_rows(from, row_, 1, call_.value_width, rows_of(to, batch_, head, t), false);
  }

  void read_backward(int64_t head, int64_t t, const Memory& gradients) {
    take_query(head, t);
    read(call_.gradient, head, t, gradient_);
    query_.each([&](int64_t p, int64_t place, float weight) {
      of_products_[p] = memory_.product(memory_.row(place), gradient_);
      gradients.add(weight, gradient_, gradients.row(place));
    });
    query_.differentiate(of_products_, call_.of_query.at(batch_, head, t));
  }

  // With u = s (v - S phi) and S' = S + phi u: the memory S' becomes S, and its gradient likewise.
  void write_backward(int64_t t, const Memory& gradients) {
    take_key(t);
    const float strength = *call_.strength.at(batch_, head_, t);
    read(call_.written, head_, t, written_);
    read(call_.value, head_, t, value_);
    zero(of_written_, row_);
    gradients.read(key_, 1.0f, of_written_);
    key_.each([&](int64_t p, int64_t place, float) {
      of_products_[p] = gradients.product(gradients.row(place), written_);
    });
    memory_.write(key_, -1.0f, written_);  // before it is read: a cell may be named twice
    memory_.read(key_, -1.0f, value_);
    key_.each([&](int64_t p, int64_t place, float) {
      of_products_[p] -= strength * memory_.product(memory_.row(place), of_written_);
    });
    gradients.write(key_, -strength, of_written_);
    *call_.of_strength.at(batch_, head_, t) = dot(of_written_, value_, row_);
    for (int64_t i = 0; i < row_; i++) of_written_[i] *= strength;
    write(of_written_, call_.of_value, head_, t);
    key_.differentiate(of_products_, call_.of_key.at(batch_, head_, t));
  }

  const DeltaMemoryCall& call_;
  int64_t batch_ = 0, head_ = 0, group_, row_;
  Products key_, query_;
  Memory memory_;
  Buffer value_, written_, gradient_, of_written_, of_products_;
};

// work(memory, unit) for the key heads first..last, counted over the batch. Returns 0, or 1 where memory ran out.
template <class Work>
int run(const DeltaMemoryCall* call, int64_t first, int64_t last, Work work) {
  try {
    DeltaMemory memory(*call);
    for (int64_t unit = first; unit < last; unit++) {
      memory.start(unit);
      work(memory);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" int delta_memory(const DeltaMemoryCall* call, int64_t first, int64_t last) {
  return run(call, first, last, [](DeltaMemory& memory) { memory.forward(); });
}

extern "C" int delta_memory_backward(const DeltaMemoryCall* call, int64_t first, int64_t last) {
  try {
    Memory gradients(*call, false);
    return run(call, first, last, [&](DeltaMemory& memory) { memory.backward(gradients); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
