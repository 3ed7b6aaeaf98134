// Projections by packed weights. Knows pointers and sizes; the caller decides how rows and columns are shared among threads.
#pragma once
#include <type_traits>

#include "vector.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace headrace {

constexpr int PANEL = 2 * LANES;  // output features that lie side by side in a packed weight
// A float32 weight is packed as [panels][in][PANEL], a bf16 weight as [panels][in / 2, rounded up][PANEL][2]: the pairs that bf16
// instructions add up, and that a shift and a mask widen elsewhere.

// How many rows are multiplied at a time: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;
#endif

#if defined(__AVX512BF16__)
constexpr bool NATIVE_BF16 = true;
#else
constexpr bool NATIVE_BF16 = false;
#endif

// What rows are given as, for weights of type W.
template <typename W>
using Row = std::conditional_t<NATIVE_BF16, W, float>;

// One step of a product: sums += x[k]... times `from`, which holds `STEP` inputs of TILE_VECTORS x LANES features.
template <int ROWS>
inline void accumulate(vec (*sums)[TILE_VECTORS], const float* x, long stride, const float* from, int) {
  vec b[TILE_VECTORS];
  for (int v = 0; v < TILE_VECTORS; v++) b[v] = load(from + v * LANES);
  for (int r = 0; r < ROWS; r++) {
    vec a = splat(x[r * stride]);
    for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += a * b[v];
  }
}

// `count` is 2, or 1 for the last input of an odd number.
template <int ROWS>
inline void accumulate(vec (*sums)[TILE_VECTORS], const float* x, long stride, const bf16* from, int count) {
  vec even[TILE_VECTORS], odd[TILE_VECTORS];
  for (int v = 0; v < TILE_VECTORS; v++) {
    uvec pair;
    memcpy(&pair, from + 2 * v * LANES, sizeof pair);
    even[v] = (vec)(pair << 16);
    odd[v] = (vec)(pair & 0xffff0000);
  }
  for (int r = 0; r < ROWS; r++) {
    vec a = splat(x[r * stride]);
    for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += a * even[v];
    if (count == 1) continue;
    a = splat(x[r * stride + 1]);
    for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += a * odd[v];
  }
}

#if defined(__AVX512BF16__)
template <int ROWS>
inline void accumulate(vec (*sums)[TILE_VECTORS], const bf16* x, long stride, const bf16* from, int count) {
  __m512bh b[TILE_VECTORS];
  for (int v = 0; v < TILE_VECTORS; v++) memcpy(&b[v], from + 2 * v * LANES, sizeof b[v]);
  for (int r = 0; r < ROWS; r++) {
    uint32_t pair = x[r * stride].bits;
    if (count == 2) memcpy(&pair, x + r * stride, sizeof pair);
    __m512bh a = (__m512bh)_mm512_set1_epi32(int(pair));
    for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = (vec)_mm512_dpbf16_ps((__m512)sums[r][v], a, b[v]);
  }
}
#endif

// out[ROWS][PANEL] = x[ROWS][in] (rows `stride` apart) times one panel. The sum of an element runs over the inputs in one order,
// whatever the number of rows: results do not depend on who else is in the batch.
template <int ROWS, typename W>
inline void multiply(const Row<W>* x, long stride, const W* panel, long in, float (*out)[PANEL]) {
  constexpr int step = sizeof(float) / sizeof(W);
  for (int part = 0; part < PANEL; part += TILE_VECTORS * LANES) {
    vec sums[ROWS][TILE_VECTORS] = {};
    const W* w = panel + part * step;
    long k = 0;
    for (; k + step <= in; k += step, w += PANEL * step) accumulate<ROWS>(sums, x + k, stride, w, step);
    if (k < in) accumulate<ROWS>(sums, x + k, stride, w, 1);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < TILE_VECTORS; v++) store(out[r] + part + v * LANES, sums[r][v]);
  }
}

template <typename W, int ROWS = TILE_ROWS>
inline void multiply_up_to(int rows, const Row<W>* x, long stride, const W* panel, long in, float (*out)[PANEL]) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_up_to<W, ROWS - 1>(rows, x, stride, panel, in, out);
  multiply<ROWS>(x, stride, panel, in, out);
}

// One panel of `linear`: out[rows][features], columns `first`... of it.
template <typename W, typename T>
void linear_panel(const Row<W>* x, long rows, const W* panel, const T* bias, long in, T* out, long features, long first) {
  float block[TILE_ROWS][PANEL];
  long width = features - first < PANEL ? features - first : PANEL;
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int count = int(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
    multiply_up_to<W>(count, x + row * in, in, panel, in, block);
    for (int r = 0; r < count; r++) {
      T* to = out + (row + r) * features + first;
      if (bias)
        for (long i = 0; i < width; i++) block[r][i] += widen(bias[first + i]);
      if (width == PANEL)
        for (int v = 0; v < PANEL; v += LANES) store(to + v, load(block[r] + v));
      else
        for (long i = 0; i < width; i++) store(to + i, block[r][i]);
    }
  }
}

// One panel of a gated product, whose lanes are LANES gates and LANES ups: out = SiLU(gate) x up, columns `first`... of it.
template <typename W, typename T>
void gated_panel(const Row<W>* x, long rows, const W* panel, const T* bias, long in, T* out, long features, long first) {
  float block[TILE_ROWS][PANEL];
  long width = features - first < LANES ? features - first : LANES;
  for (long row = 0; row < rows; row += TILE_ROWS) {
    int count = int(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
    multiply_up_to<W>(count, x + row * in, in, panel, in, block);
    for (int r = 0; r < count; r++) {
      T* to = out + (row + r) * features + first;
      if (bias)
        for (long i = 0; i < width; i++) {
          block[r][i] += widen(bias[first + i]);
          block[r][LANES + i] += widen(bias[features + first + i]);
        }
      vec y = silu(load(block[r])) * load(block[r] + LANES);
      if (width == LANES)
        store(to, y);
      else
        for (long i = 0; i < width; i++) store(to + i, y[i]);
    }
  }
}

}  // namespace headrace
