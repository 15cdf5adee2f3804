// The operations of reference.py for CPUs: one pass over each row, every rounding where the schedule puts it.
//
// Results are the reference's bits, so whatever leaves room in FP32 follows ATen, whose kernels the reference calls: the
// order of every sum (cascade_sum in SumKernel.cpp), where exp is Sleef's and where libm's, and the multiply-add in silu's
// gradient that ATen's own build contracts. This file is compiled with -ffp-contract=off: nothing else is contracted.
// cpu.py compares with the reference before use.
//
// Pointers come from cpu.py, which checks dtypes and layouts. A tensor is in the compute dtype T or, where `wide`, in FP32.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::vec::Vectorized;
using V = Vectorized<float>;
constexpr int64_t W = V::size();
constexpr int64_t kGrain = 32768;  // ATen's: elements below which it does not use threads

// Codes shared with cpu.py.
enum Dtype : int32_t { kBFloat16, kFloat16, kFloat32 };
enum Cast : int32_t { kNearestEven, kTowardZero };
enum RopeCompute : int32_t { kStepwise, kFma, kOnce };
enum SumRound : int32_t { kBeforeVar, kAfterVar, kNever };

// -- Vectors ----------------------------------------------------------------------------------------------------------

// Calls f(i, count) for every vector of a row of n elements; count is a constant but for the last, partial vector.
template <typename F>
C10_ALWAYS_INLINE void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, std::integral_constant<int64_t, W>{});
  if (i < n) f(i, n - i);
}

template <typename T>
C10_ALWAYS_INLINE V load(const T* p, int64_t count) {
  return at::vec::convert<float>(Vectorized<T>::loadu(p, count));
}

template <typename T>
C10_ALWAYS_INLINE V load(const void* p, bool wide, int64_t i, int64_t count) {
  return wide ? load(static_cast<const float*>(p) + i, count) : load(static_cast<const T*>(p) + i, count);
}

// f applied to every lane of its arguments, for what has no vector form.
template <typename F, typename... Vs>
V elementwise(const F& f, Vs... xs) {
  alignas(64) float lanes[sizeof...(Vs)][W], out[W];
  int n = 0;
  (xs.store(lanes[n++]), ...);
  for (int64_t k = 0; k < W; ++k) {
    const auto lane = [&]<size_t... j>(std::index_sequence<j...>) { return f(lanes[j][k]...); };
    out[k] = lane(std::index_sequence_for<Vs...>{});
  }
  return V::loadu(out);
}

template <typename T>
V toward_zero(V x) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const Vectorized<int32_t> kept = at::vec::cast<int32_t>(x) & Vectorized<int32_t>(static_cast<int32_t>(0xFFFF0000));
    return V::blendv(at::vec::cast<float>(kept), x, x != x);
  } else {
    return elementwise(
        [](float value) {
          T y = static_cast<T>(value);
          // Sign and magnitude: one less in the bit pattern is the neighbour toward zero.
          if (std::fabs(static_cast<float>(y)) > std::fabs(value)) y.x -= 1;
          return static_cast<float>(y);
        },
        x);
  }
}

// The values of x rounded to T.
template <typename T, Cast cast>
C10_ALWAYS_INLINE V round_to(V x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (cast == kNearestEven) {
    return at::vec::convert<float>(at::vec::convert<T>(x));
  } else {
    return toward_zero<T>(x);
  }
}

template <typename T, Cast cast>
C10_ALWAYS_INLINE void store(V x, void* p, bool wide, int64_t i, int64_t count) {
  if (wide) {
    x.store(static_cast<float*>(p) + i, count);
  } else {
    if constexpr (cast == kTowardZero) x = round_to<T, cast>(x);
    at::vec::convert<T>(x).store(static_cast<T*>(p) + i, count);
  }
}

// A tensor of rows under three outer dimensions; in a row, elements follow each other.
struct Rows {
  void* data;
  int64_t stride[3];
  int64_t wide;
};

// Where a row stands under the three outer dimensions.
class Place {
 public:
  Place(int64_t row, const int64_t* size)
      : size_(size), index_{row / (size[1] * size[2]), row / size[2] % size[1], row % size[2]} {}

  int64_t in(const Rows& rows) const {
    return index_[0] * rows.stride[0] + index_[1] * rows.stride[1] + index_[2] * rows.stride[2];
  }

  void advance() {
    if (++index_[2] < size_[2]) return;
    index_[2] = 0;
    if (++index_[1] < size_[1]) return;
    index_[1] = 0;
    ++index_[0];
  }

 private:
  const int64_t* size_;
  int64_t index_[3];
};

int64_t row_count(const int64_t* size) { return size[0] * size[1] * size[2]; }

template <typename T>
C10_ALWAYS_INLINE V load(const Rows& rows, int64_t at, int64_t count) {
  return load<T>(rows.data, rows.wide, at, count);
}

template <typename T, Cast cast>
C10_ALWAYS_INLINE void store(V x, const Rows& rows, int64_t at, int64_t count) {
  store<T, cast>(x, rows.data, rows.wide, at, count);
}

// x * y + z as an FMA of T would round it: the exact value, rounded to odd on the way to FP32 and then to T.
float fma_to_odd(float x, float y, float z32) {
  const double product = static_cast<double>(x) * static_cast<double>(y), z = z32;
  double total = product + z;
  // What the addition lost, exactly (Knuth, TwoSum).
  const double back = total - product;
  const double lost = (product - (total - back)) + (z - back);
  if (std::fabs(lost) > 0) {
    total = std::bit_cast<double>((std::bit_cast<int64_t>(total) - ((lost < 0) != (total < 0))) | 1);
  }
  float y32 = static_cast<float>(total);
  if (static_cast<double>(y32) != total) {
    y32 = std::bit_cast<float>((std::bit_cast<int32_t>(y32) - (std::fabs(static_cast<double>(y32)) > std::fabs(total))) | 1);
  }
  return y32;
}

// -- Sums in ATen's order ---------------------------------------------------------------------------------------------

constexpr int64_t kLanes = 8;  // ATen's vector width in sums, on AVX512 machines too
constexpr int64_t kStrand = 4 * kLanes;  // elements of a row that are summed side by side
constexpr int kLevels = 4;

int64_t level_power(int64_t size) {
  return std::max<int64_t>(4, (size <= 2 ? 1 : std::bit_width(static_cast<uint64_t>(size) - 1)) / kLevels);
}

// `size` summands, each of `width` numbers side by side. The sum runs in blocks of 2^level_power; each block's sum is added
// to the level above, and so on.
template <typename Number, int width>
class Cascade {
 public:
  explicit Cascade(int64_t size) : power_(level_power(size)) {
    for (auto& level : acc_)
      for (auto& a : level) a = Number(0);
  }

  Number* block() { return acc_[0]; }

  // After every summand with number `i` (counted from 1) that ends a block.
  void end_block(int64_t i) {
    const int64_t mask = (int64_t{1} << power_) - 1;
    for (int level = 1; level < kLevels; ++level) {
      for (int k = 0; k < width; ++k) {
        acc_[level][k] = acc_[level][k] + acc_[level - 1][k];
        acc_[level - 1][k] = Number(0);
      }
      if ((i & (mask << (level * power_))) != 0) break;
    }
  }

  const Number* total() {
    for (int level = 1; level < kLevels; ++level)
      for (int k = 0; k < width; ++k) acc_[0][k] = acc_[0][k] + acc_[level][k];
    return acc_[0];
  }

  int64_t step() const { return int64_t{1} << power_; }

 private:
  int64_t power_;
  Number acc_[kLevels][width];
};

// Adds f(0) ... f(size - 1), arrays of `width` numbers, given as add(i, accumulator).
template <typename Number, int width, typename F>
void cascade(Cascade<Number, width>& sum, int64_t size, const F& add) {
  int64_t i = 0;
  while (i + sum.step() <= size) {
    for (int64_t j = 0; j < sum.step(); ++j, ++i) add(i, sum.block());
    sum.end_block(i);
  }
  for (; i < size; ++i) add(i, sum.block());
}

// Sum of n scalars f(0) ... f(n - 1): four interleaved cascades.
template <typename F>
float scalar_sum(int64_t n, const F& f) {
  const int64_t rows = n / 4;
  Cascade<float, 4> sum(rows);
  cascade(sum, rows, [&](int64_t i, float* acc) {
    for (int64_t k = 0; k < 4; ++k) acc[k] += f(4 * i + k);
  });
  const float* parts = sum.total();
  float total = parts[0];
  for (int64_t i = 4 * rows; i < n; ++i) total += f(i);
  for (int64_t k = 1; k < 4; ++k) total += parts[k];
  return total;
}

// Sum of a[i] * b[i] over a row.
float dot(const float* a, const float* b, int64_t n) {
  if (n < kLanes) {
    return scalar_sum(n, [&](int64_t i) { return a[i] * b[i]; });
  }
  constexpr int kVectors = kStrand / W;
  const int64_t strands = n / kStrand;
  Cascade<V, kVectors> sum(strands);
  cascade(sum, strands, [&](int64_t i, V* acc) {
    for (int k = 0; k < kVectors; ++k) {
      const int64_t at = i * kStrand + k * W;
      acc[k] = acc[k] + V::loadu(a + at) * V::loadu(b + at);
    }
  });
  alignas(64) float parts[kStrand];
  const V* totals = sum.total();
  for (int k = 0; k < kVectors; ++k) totals[k].store(parts + k * W);
  int64_t i = strands * kStrand;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) parts[k] += a[i + k] * b[i + k];
  for (int64_t strand = 1; strand < 4; ++strand)
    for (int64_t k = 0; k < kLanes; ++k) parts[k] += parts[strand * kLanes + k];
  float total = 0;
  for (; i < n; ++i) total += a[i] * b[i];
  for (int64_t k = 0; k < kLanes; ++k) total += parts[k];
  return total;
}

// -- RoPE -------------------------------------------------------------------------------------------------------------

struct RopeArgs {
  Rows x, cos, sin, out;
  int64_t size[3], head_dim;
  int32_t dtype, compute, cast, backward;
};

template <typename T, Cast cast, RopeCompute compute>
C10_ALWAYS_INLINE V rotated(V x, V cos, V partner, V sin) {
  if constexpr (compute == kOnce) {
    return x * cos + partner * sin;
  } else if constexpr (compute == kStepwise) {
    return round_to<T, cast>(x * cos) + round_to<T, cast>(partner * sin);
  } else {
    return elementwise(fma_to_odd, x, cos, round_to<T, cast>(partner * sin));
  }
}

// Rotates the row `x_at` of `x` into the row `out_at` of `out`, by the angles of `place`.
template <typename T, Cast cast, RopeCompute compute>
void rotate_row(const RopeArgs& a, const Place& place, const Rows& x, int64_t x_at, const Rows& out, int64_t out_at) {
  const int64_t half = a.head_dim / 2, cos = place.in(a.cos), sin = place.in(a.sin);
  for_vectors(half, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
    const int64_t j = half + i;
    const V first = load<T>(x, x_at + i, count), second = load<T>(x, x_at + j, count);
    V sin_first = load<T>(a.sin, sin + i, count), sin_second = load<T>(a.sin, sin + j, count);
    if (a.backward) {
      sin_first = sin_first.neg();
      sin_second = sin_second.neg();
    }
    const V cos_first = load<T>(a.cos, cos + i, count), cos_second = load<T>(a.cos, cos + j, count);
    store<T, cast>(rotated<T, cast, compute>(first, cos_first, second.neg(), sin_first), out, out_at + i, count);
    store<T, cast>(rotated<T, cast, compute>(second, cos_second, first, sin_second), out, out_at + j, count);
  });
}

// The `rotate_row` for a call.
template <typename T>
auto rotation(const RopeArgs& a) {
  const auto of = [&]<Cast cast>() {
    if (a.compute == kStepwise) return &rotate_row<T, cast, kStepwise>;
    return a.compute == kFma ? &rotate_row<T, cast, kFma> : &rotate_row<T, cast, kOnce>;
  };
  return a.cast == kTowardZero ? of.template operator()<kTowardZero>() : of.template operator()<kNearestEven>();
}

template <typename T>
void rope(const RopeArgs& a) {
  const auto rotate = rotation<T>(a);
  at::parallel_for(0, row_count(a.size), std::max<int64_t>(1, kGrain / a.head_dim), [&](int64_t begin, int64_t end) {
    Place place(begin, a.size);
    for (int64_t row = begin; row < end; ++row, place.advance()) {
      rotate(a, place, a.x, place.in(a.x), a.out, place.in(a.out));
    }
  });
}

// -- SwiGLU -----------------------------------------------------------------------------------------------------------

using Int = Vectorized<int32_t>;
using Short = Vectorized<int16_t>;

// 2 * W consecutive elements as two vectors, in an order that all functions of pairs share: BF16's even and odd elements,
// which takes no shuffles.
struct Pair {
  V a, b;
};

template <typename T>
C10_ALWAYS_INLINE Pair load_pair(const T* p) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const Int bits = Int::loadu(p);
    return {at::vec::cast<float>(bits << Int(16)), at::vec::cast<float>(bits & Int(0xFFFF0000))};
  } else {
    return {load(p, W), load(p + W, W)};
  }
}

// What `table`, which begins at the number with pattern -2^15, has for each of a pair's numbers of 16 bits.
template <typename T>
C10_ALWAYS_INLINE Pair look_up(const float* table, const T* p) {
  table += 1 << 15;
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const Int bits = Int::loadu(p);
    return {at::vec::gather<4>(table, bits << Int(16) >> Int(16)), at::vec::gather<4>(table, bits >> Int(16))};
  } else {
    alignas(64) float found[2 * W];
    for (int64_t k = 0; k < 2 * W; ++k) found[k] = table[static_cast<int16_t>(p[k].x)];
    return {V::loadu(found), V::loadu(found + W)};
  }
}

// BF16 in the upper half of each number, whatever in the lower. Arithmetic on BF16 operands makes no NaN that this would
// turn into something else: their payloads are BF16's or the processor's own.
template <Cast cast>
C10_ALWAYS_INLINE Int bf16_above(V x) {
  const Int bits = at::vec::cast<int32_t>(x);
  return cast == kTowardZero ? bits : bits + Int(0x7FFF) + ((bits >> Int(16)) & Int(1));
}

template <typename T>
C10_ALWAYS_INLINE V round_in_pair(V x) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return at::vec::cast<float>(bf16_above<kNearestEven>(x) & Int(0xFFFF0000));
  } else {
    return round_to<T, kNearestEven>(x);
  }
}

template <typename T, Cast cast>
C10_ALWAYS_INLINE void store_pair(Pair x, T* p) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const Int even = bf16_above<cast>(x.a) >> Int(16), odd = bf16_above<cast>(x.b);
    const Short upper = at::vec::cast<int16_t>(Int(0xFFFF0000));
    Short::blendv(at::vec::cast<int16_t>(even), at::vec::cast<int16_t>(odd), upper).store(p);
  } else {
    store<T, cast>(x.a, p, false, 0, W);
    store<T, cast>(x.b, p, false, W, W);
  }
}

V silu(V x) { return x / (V(1.0f) + x.neg().exp()); }
V sigmoid(V x) { return V(1.0f) / (V(1.0f) + x.neg().exp()); }
float silu(float x) { return x / (1.0f + std::exp(-x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

C10_ALWAYS_INLINE V silu_backward(V grad, V x, V sigmoid) {
  return grad * sigmoid * at::vec::fmadd(x, V(1.0f) - sigmoid, V(1.0f));
}

// silu whose sigmoid rounds after every step.
template <typename T, Cast cast>
V silu_bf16_sigmoid(V x) {
  const V one(1.0f);
  const V y = round_to<T, cast>(one / round_to<T, cast>(one + round_to<T, cast>(x.abs().exp())));
  return x * V::blendv(round_to<T, cast>(one - y), y, x < V(0.0f));
}

// f of every number of 16 bits, in the order of their patterns as signed integers. Looking it up takes a third of the time of
// an exp and a division: the gates of a layer have few different exponents, and what they need of a table fits the innermost
// cache.
template <typename T, typename F>
std::vector<float> tabulated(const F& f) {
  std::vector<float> table(size_t{1} << 16);
  T gates[W];
  for (size_t i = 0; i < table.size(); i += W) {
    for (int64_t k = 0; k < W; ++k) gates[k].x = static_cast<uint16_t>(i + k + (1 << 15));
    f(load(gates, W)).store(&table[i]);
  }
  return table;
}

template <typename T>
const float* sigmoid_table() {
  static const std::vector<float> table = tabulated<T>([](V x) { return sigmoid(x); });
  return table.data();
}

template <typename T, Cast cast>
const float* silu_table(bool rounded, bool bf16_sigmoid) {
  static const std::vector<float> tables[] = {
      tabulated<T>([](V x) { return silu(x); }),
      tabulated<T>([](V x) { return round_to<T, cast>(silu(x)); }),
      tabulated<T>([](V x) { return silu_bf16_sigmoid<T, cast>(x); }),
      tabulated<T>([](V x) { return round_to<T, cast>(silu_bf16_sigmoid<T, cast>(x)); }),
  };
  return tables[2 * bf16_sigmoid + rounded].data();
}

struct GatedArgs {
  const void *grad, *gate, *up;
  void *out, *grad_gate, *grad_up;
  int64_t numel;
  int32_t dtype, round_act, bf16_sigmoid, cast;
};

// Calls pairs(i) and then rest(i, count) over [0, numel) in the shares and steps of ATen's pointwise loops. What does not
// fill a pair they compute element by element, with libm's exp instead of Sleef's.
template <typename Pairs, typename Rest>
void for_pointwise(int64_t numel, const Pairs& pairs, const Rest& rest) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    const auto own = pairs;  // no store can reach what it holds: pointers stay in registers
    int64_t i = begin;
    for (; i + 2 * W <= end; i += 2 * W) own(i);
    for (; i < end; i += W) rest(i, std::min(W, end - i));
  });
}

template <typename T, Cast cast>
void gated_act(const GatedArgs& a) {
  const auto *gate = static_cast<const T*>(a.gate), *up = static_cast<const T*>(a.up);
  const auto out = static_cast<T*>(a.out);
  const bool round_act = a.round_act, bf16_sigmoid = a.bf16_sigmoid;
  const float* table = silu_table<T, cast>(round_act, bf16_sigmoid);
  const auto pairs = [=](int64_t i) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Pair activated = look_up(table, gate + i), u = load_pair(up + i);
    store_pair<T, cast>({activated.a * u.a, activated.b * u.b}, out + i);
  };
  const auto rest = [=](int64_t i, int64_t count) {
    const V g = load(gate + i, count);
    V activated = bf16_sigmoid ? silu_bf16_sigmoid<T, cast>(g) : elementwise([](float x) { return silu(x); }, g);
    if (round_act) activated = round_to<T, cast>(activated);
    store<T, cast>(activated * load(up + i, count), out, false, i, count);
  };
  for_pointwise(a.numel, pairs, rest);
}

template <typename T, Cast cast>
void gated_act_backward(const GatedArgs& a) {
  const bool stepwise = a.round_act && !a.bf16_sigmoid;
  const auto *gate = static_cast<const T*>(a.gate), *up = static_cast<const T*>(a.up), *grad = static_cast<const T*>(a.grad);
  const auto grad_gate = static_cast<T*>(a.grad_gate), grad_up = static_cast<T*>(a.grad_up);
  const float *silus = silu_table<T, cast>(stepwise, false), *sigmoids = sigmoid_table<T>();
  const auto pairs = [=](int64_t i) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Pair g = load_pair(gate + i), u = load_pair(up + i), d = load_pair(grad + i);
    const Pair activated = look_up(silus, gate + i), s = look_up(sigmoids, gate + i);
    Pair d_activated = {d.a * u.a, d.b * u.b};
    if (stepwise) d_activated = {round_in_pair<T>(d_activated.a), round_in_pair<T>(d_activated.b)};
    store_pair<T, kNearestEven>(
        {silu_backward(d_activated.a, g.a, s.a), silu_backward(d_activated.b, g.b, s.b)}, grad_gate + i);
    store_pair<T, kNearestEven>({d.a * activated.a, d.b * activated.b}, grad_up + i);
  };
  const auto rest = [=](int64_t i, int64_t count) {
    const V g = load(gate + i, count), d = load(grad + i, count);
    V activated = elementwise([](float x) { return silu(x); }, g), d_activated = d * load(up + i, count);
    if (stepwise) {
      activated = round_to<T, cast>(activated);
      d_activated = round_to<T, kNearestEven>(d_activated);
    }
    const V s = elementwise([](float x) { return sigmoid(x); }, g);
    store<T, kNearestEven>(silu_backward(d_activated, g, s), grad_gate, false, i, count);
    store<T, kNearestEven>(d * activated, grad_up, false, i, count);
  };
  for_pointwise(a.numel, pairs, rest);
}

// -- Residual add + RMSNorm -------------------------------------------------------------------------------------------

struct NormArgs {
  Rows x, residual, grad_out, grad_carry, out, carry, grad_x, grad_residual, rstd;
  const void* weight;
  void* grad_weight;
  int64_t size[3], hidden;
  float eps;
  int32_t dtype, weight_wide, sum_round, norm_round, stepwise, cast;
};

template <typename T>
std::vector<float> weight_in_fp32(const NormArgs& a) {
  std::vector<float> weight(a.hidden);
  for_vectors(a.hidden, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE { load<T>(a.weight, a.weight_wide, i, count).store(&weight[i], count); });
  return weight;
}

// One row of the residual sum: as the variance sees it and as the normalisation sees it (the same memory where they agree).
template <typename T, Cast cast>
class SumRow {
 public:
  explicit SumRow(const NormArgs& a)
      : a_(a), first_(a.hidden), second_(a.sum_round == kAfterVar ? a.hidden : 0) {}

  const float* seen_by_var() const { return first_.data(); }
  const float* seen_by_norm() const { return a_.sum_round == kAfterVar ? second_.data() : first_.data(); }

  void read(const Place& place) {
    const int64_t x_at = place.in(a_.x), residual_at = place.in(a_.residual), carry_at = place.in(a_.carry);
    for_vectors(a_.hidden, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
      V sum = load<T>(a_.x, x_at + i, count);
      if (a_.residual.data) sum = load<T>(a_.residual, residual_at + i, count) + sum;
      if (a_.carry.data) store<T, cast>(sum, a_.carry, carry_at + i, count);
      if (a_.sum_round == kBeforeVar) sum = round_to<T, cast>(sum);
      sum.store(&first_[i], count);
      if (a_.sum_round == kAfterVar) round_to<T, cast>(sum).store(&second_[i], count);
    });
  }

 private:
  const NormArgs& a_;
  std::vector<float> first_, second_;
};

// With `rope`, the output is the norm's rotated, and `a.out` only tells the norm's dtype.
template <typename T, Cast cast>
void add_rms_norm(const NormArgs& a, const RopeArgs* rope) {
  const std::vector<float> weight = weight_in_fp32<T>(a);
  const auto rotate = rope ? rotation<T>(*rope) : nullptr;
  at::parallel_for(0, row_count(a.size), std::max<int64_t>(1, kGrain / a.hidden), [&](int64_t begin, int64_t end) {
    SumRow<T, cast> sum(a);
    std::vector<float> normed(rope ? a.hidden : 0);
    Rows out = a.out;
    if (rope) out.data = normed.data();
    Place place(begin, a.size);
    for (int64_t row = begin; row < end; ++row, place.advance()) {
      sum.read(place);
      const float mean_square = dot(sum.seen_by_var(), sum.seen_by_var(), a.hidden) / static_cast<float>(a.hidden);
      const float rstd = 1.0f / std::sqrt(mean_square + a.eps);
      static_cast<float*>(a.rstd.data)[place.in(a.rstd)] = rstd;
      const int64_t out_at = place.in(out);
      for_vectors(a.hidden, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
        V normalised = load(sum.seen_by_norm() + i, count) * V(rstd);
        if (a.norm_round) normalised = round_to<T, cast>(normalised);
        store<T, cast>(normalised * load(&weight[i], count), out, out_at + i, count);
      });
      if (rope) rotate(*rope, place, out, out_at, rope->out, place.in(rope->out));
    }
  });
}

// The weight's gradient is ATen's sum over rows: columns in strands of 32 run through one cascade over the rows; columns
// left over through four interleaved ones, as `scalar_sum` does. With `rope`, the gradient at the norm's output is the one in
// `rope` rotated back, and `a.grad_out` only tells its dtype.
template <typename T, Cast cast>
void add_rms_norm_backward(const NormArgs& a, const RopeArgs* rope) {
  const std::vector<float> weight = weight_in_fp32<T>(a);
  const auto rotate = rope ? rotation<T>(*rope) : nullptr;
  const int64_t rows = row_count(a.size), step = int64_t{1} << level_power(rows), blocks = (rows + step - 1) / step;
  const int64_t rest = a.hidden < kLanes ? a.hidden % 4 : a.hidden % kStrand, whole = a.hidden - rest;
  std::vector<float> block_sums(blocks * whole), rest_rows(rows * rest);

  at::parallel_for(0, blocks, std::max<int64_t>(1, kGrain / (a.hidden * step)), [&](int64_t begin, int64_t end) {
    SumRow<T, cast> sum(a);
    std::vector<float> d_normalised(a.hidden), d_weight(a.hidden), unrotated(rope ? a.hidden : 0);
    Rows grad_out = a.grad_out;
    if (rope) grad_out.data = unrotated.data();
    Place place(begin * step, a.size);
    for (int64_t row = begin * step; row < std::min(end * step, rows); ++row, place.advance()) {
      sum.read(place);
      const float rstd = static_cast<const float*>(a.rstd.data)[place.in(a.rstd)];
      const int64_t grad_at = place.in(grad_out);
      if (rope) rotate(*rope, place, rope->x, place.in(rope->x), grad_out, grad_at);
      for_vectors(a.hidden, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
        V normalised = load(sum.seen_by_norm() + i, count) * V(rstd);
        if (a.norm_round) normalised = round_to<T, cast>(normalised);
        const V d = load<T>(grad_out, grad_at + i, count);
        V d_norm = d * load(&weight[i], count), d_w = d * normalised;
        if (a.stepwise) {
          d_norm = round_to<T, kNearestEven>(d_norm);
          d_w = round_to<T, kNearestEven>(d_w);
        }
        d_norm.store(&d_normalised[i], count);
        d_w.store(&d_weight[i], count);
      });
      float* block_sum = &block_sums[row / step * whole];
      for_vectors(whole, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
        (load(block_sum + i, count) + load(&d_weight[i], count)).store(block_sum + i, count);
      });
      std::copy_n(d_weight.data() + whole, rest, rest_rows.data() + row * rest);

      // d rstd / d variance, then d variance / d x: the factors stand in autograd's order, for its bits.
      const float d_rstd = dot(d_normalised.data(), sum.seen_by_norm(), a.hidden);
      const float d_square = -0.5f * d_rstd * (rstd * rstd * rstd) / static_cast<float>(a.hidden);
      const int64_t carry_at = place.in(a.grad_carry), x_at = place.in(a.grad_x), residual_at = place.in(a.grad_residual);
      for_vectors(a.hidden, [&](int64_t i, auto count) C10_ALWAYS_INLINE_ATTRIBUTE {
        V d = load(&d_normalised[i], count) * V(rstd) + V(d_square) * (V(2.0f) * load(sum.seen_by_var() + i, count));
        if (a.stepwise) d = round_to<T, kNearestEven>(d);
        if (a.grad_carry.data) d = d + load<T>(a.grad_carry, carry_at + i, count);
        store<T, kNearestEven>(d, a.grad_x, x_at + i, count);
        if (a.grad_residual.data) store<T, kNearestEven>(d, a.grad_residual, residual_at + i, count);
      });
    }
  });

  at::parallel_for(0, (whole + W - 1) / W, std::max<int64_t>(1, kGrain / (W * (blocks + 1))), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * W; i < std::min(end * W, whole); i += W) {
      const int64_t count = std::min(W, whole - i);
      Cascade<V, 1> column(rows);
      for (int64_t block = 0; block < blocks; ++block) {
        *column.block() = load(&block_sums[block * whole + i], count);
        if ((block + 1) * step <= rows) column.end_block((block + 1) * step);
      }
      store<T, kNearestEven>(*column.total(), a.grad_weight, a.weight_wide, i, count);
    }
  });
  for (int64_t i = 0; i < rest; ++i) {
    const V total(scalar_sum(rows, [&](int64_t row) { return rest_rows[row * rest + i]; }));
    store<T, kNearestEven>(total, a.grad_weight, a.weight_wide, whole + i, 1);
  }
}

// -- Adding and rounding ----------------------------------------------------------------------------------------------

struct AddArgs {
  const void *x, *residual;
  void* out;
  int64_t numel;
  int32_t dtype, x_wide, residual_wide, out_wide, cast;
};

template <typename T, Cast cast>
void add(const AddArgs& a) {
  at::parallel_for(0, a.numel, kGrain, [&](int64_t begin, int64_t end) {
    for_vectors(end - begin, [&](int64_t k, auto count) {
      const int64_t i = begin + k;
      V sum = load<T>(a.x, a.x_wide, i, count);
      if (a.residual) sum = load<T>(a.residual, a.residual_wide, i, count) + sum;
      store<T, cast>(sum, a.out, a.out_wide, i, count);
    });
  });
}

// -- Dispatch ---------------------------------------------------------------------------------------------------------

// Calls f<T, cast>() for the dtype and cast of a call of 16 bits.
template <typename F>
void dispatch16(int32_t dtype, int32_t cast, const F& f) {
  const auto with_cast = [&]<typename T>(T) {
    if (cast == kTowardZero) {
      f.template operator()<T, kTowardZero>();
    } else {
      f.template operator()<T, kNearestEven>();
    }
  };
  if (dtype == kBFloat16) {
    with_cast(at::BFloat16{});
  } else {
    with_cast(at::Half{});
  }
}

template <typename F>
void dispatch(int32_t dtype, int32_t cast, const F& f) {
  if (dtype == kFloat32) {
    f.template operator()<float, kNearestEven>();
  } else {
    dispatch16(dtype, cast, f);
  }
}

}  // namespace

extern "C" {

void tripoint_rope(const RopeArgs* a) {
  dispatch(a->dtype, a->cast, [&]<typename T, Cast cast>() { rope<T>(*a); });
}

void tripoint_gated_act(const GatedArgs* a) {
  dispatch16(a->dtype, a->cast, [&]<typename T, Cast cast>() { gated_act<T, cast>(*a); });
}

void tripoint_gated_act_backward(const GatedArgs* a) {
  dispatch16(a->dtype, a->cast, [&]<typename T, Cast cast>() { gated_act_backward<T, cast>(*a); });
}

void tripoint_add_rms_norm(const NormArgs* a, const RopeArgs* rope) {
  dispatch(a->dtype, a->cast, [&]<typename T, Cast cast>() { add_rms_norm<T, cast>(*a, rope); });
}

void tripoint_add_rms_norm_backward(const NormArgs* a, const RopeArgs* rope) {
  dispatch(a->dtype, a->cast, [&]<typename T, Cast cast>() { add_rms_norm_backward<T, cast>(*a, rope); });
}

void tripoint_add(const AddArgs* a) {
  dispatch(a->dtype, a->cast, [&]<typename T, Cast cast>() { add<T, cast>(*a); });
}
}
