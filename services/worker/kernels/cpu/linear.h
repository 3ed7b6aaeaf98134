// Projections by packed weights. Knows pointers and sizes; the caller decides how rows and columns are shared among threads.
#pragma once
#include "vector.h"

namespace headrace {

constexpr int PANEL = 2 * LANES;  // output features that lie side by side in a packed weight: [panels][in][PANEL]

// How many rows are multiplied at a time: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;
#endif

// out[ROWS][PANEL] = x[ROWS][in] (rows `stride` apart) times one panel.
template <int ROWS, typename W>
inline void multiply(const float* x, long stride, const W* panel, long in, float (*out)[PANEL]) {
  for (int part = 0; part < PANEL; part += TILE_VECTORS * LANES) {
    vec sums[ROWS][TILE_VECTORS] = {};
    const W* w = panel + part;
    for (long k = 0; k < in; k++, w += PANEL) {
      vec b[TILE_VECTORS];
      for (int v = 0; v < TILE_VECTORS; v++) b[v] = load(w + v * LANES);
      for (int r = 0; r < ROWS; r++) {
        vec a = splat(x[r * stride + k]);
        for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += a * b[v];
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < TILE_VECTORS; v++) store(out[r] + part + v * LANES, sums[r][v]);
  }
}

template <typename W, int ROWS = TILE_ROWS>
inline void multiply_up_to(int rows, const float* x, long stride, const W* panel, long in, float (*out)[PANEL]) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_up_to<W, ROWS - 1>(rows, x, stride, panel, in, out);
  multiply<ROWS>(x, stride, panel, in, out);
}

// One panel of `linear`: out[rows][features], columns `first`... of it.
template <typename W, typename T>
void linear_panel(const float* x, long rows, const W* panel, const T* bias, long in, T* out, long features, long first) {
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
void gated_panel(const float* x, long rows, const W* panel, const T* bias, long in, T* out, long features, long first) {
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
