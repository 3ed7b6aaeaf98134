// Sixteen float lanes as one value. GCC and Clang lower it to whatever the machine has: AVX-512, AVX2, NEON. Knows no tensors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace headrace {

constexpr int LANES = 16;

using vec = float __attribute__((vector_size(64)));
using uvec = uint32_t __attribute__((vector_size(64)));
using ivec = int32_t __attribute__((vector_size(64)));
using half = uint16_t __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

inline vec splat(float x) { return x - vec{}; }

inline vec load(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline vec load(const bf16* p) {
  half h;
  memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}

inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vec v) {  // to nearest, ties to even; NaN stays NaN
  uvec u = (uvec)v;
  uvec rounded = u + 0x7fff + ((u >> 16) & 1);
  uvec quiet = u | 0x400000;
  half h = __builtin_convertvector(((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded) >> 16, half);
  memcpy(p, &h, sizeof h);
}
inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = uint16_t(((u & 0x7fffffff) > 0x7f800000 ? (u | 0x400000) : u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float sum(vec v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
inline float largest(vec v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}

// e^x to about 2 units in the last place for x <= 88; 0 below -87, NaN for NaN. (Cephes' polynomial after a split by powers of two.)
inline vec exponential(vec x) {
  vec low = splat(-87.0f), high = splat(88.0f);
  vec clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  vec scaled = clamped * 1.44269504f;
  ivec n = __builtin_convertvector(scaled + (scaled < vec{} ? splat(-0.5f) : splat(0.5f)), ivec);  // truncation makes it rounding
  vec whole = __builtin_convertvector(n, vec);
  vec r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  vec result = (p * r * r + r + 1.0f) * (vec)((n + 127) << 23);
  return x < low ? vec{} : (x == x ? result : x);
}

inline vec silu(vec x) { return x / (1.0f + exponential(-x)); }

}  // namespace headrace
