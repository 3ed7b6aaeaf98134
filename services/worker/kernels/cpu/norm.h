// RMSNorm (arXiv 1910.07467) of one row, with the residual sum before it. Knows pointers and sizes.
#pragma once
#include "vector.h"

namespace headrace {

// total = x + residual, rounded to T as it is kept; out = total / rms(total) * weight. Without a residual, total is x.
template <typename T>
void add_norm_row(const T* x, const T* residual, const T* weight, long size, float epsilon, T* out, T* total) {
  long whole = size / LANES * LANES;
  vec squares = {};
  float tail = 0;
  const T* row = x;
  if (residual) {
    for (long i = 0; i < whole; i += LANES) store(total + i, load(x + i) + load(residual + i));
    for (long i = whole; i < size; i++) store(total + i, widen(x[i]) + widen(residual[i]));
    row = total;
  }
  for (long i = 0; i < whole; i += LANES) {
    vec v = load(row + i);
    squares += v * v;
  }
  for (long i = whole; i < size; i++) tail += widen(row[i]) * widen(row[i]);
  float scale = 1.0f / std::sqrt((sum(squares) + tail) / float(size) + epsilon);
  for (long i = 0; i < whole; i += LANES) store(out + i, load(row + i) * scale * load(weight + i));
  for (long i = whole; i < size; i++) store(out + i, widen(row[i]) * scale * widen(weight[i]));
}

}  // namespace headrace
