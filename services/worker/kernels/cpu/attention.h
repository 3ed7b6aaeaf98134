// Causal attention of a flat batch over paged keys and values, with the rotation of queries and keys and the cache write before it.
// Online softmax (arXiv 1805.02867) over tiles of keys, in float32; long sequences are split over threads and reduced (Flash-Decoding).
// Pages: keys [kv_heads][blocks][dim][LANES], so that the keys of a block are lanes; values [kv_heads][blocks][LANES][dim].
// Knows pointers and sizes; the caller runs the parts of a plan on its threads.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

namespace headrace {

constexpr int BLOCK = LANES;     // tokens of a page
constexpr int KEY_TILE = 64;     // keys per step of the online softmax
constexpr int QUERY_ROWS = 96;   // query rows (queries x heads of a group) that share one walk over the keys
constexpr long SPLIT = 512;      // keys of a piece; fixed, so that a row's result depends on its own sequence alone, to the last bit
#if defined(__AVX512F__)
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif

template <typename T>
struct Attention {
  const T* qkv;                        // [tokens][heads + 2 x kv_heads][dim]
  const float *cosines, *sines;        // [positions][dim]
  const int64_t *positions, *slots;    // [tokens]
  const int *starts, *lengths, *table;  // [sequences + 1], [sequences], [sequences][table_width]
  long sequences, tokens, table_width, heads, kv_heads, dim, blocks;
  T *keys, *values, *out;
  float* queries;  // scratch [tokens][heads][dim]: rotated, and scaled by 1 / sqrt(dim)

  long group() const { return heads / kv_heads; }
  T* key_page(long head, long block) const { return keys + (head * blocks + block) * dim * BLOCK; }
  T* value_page(long head, long block) const { return values + (head * blocks + block) * BLOCK * dim; }
};

// Some queries of one sequence and one KV head against some of its keys.
struct Piece {
  long sequence, head, first_query, queries, first_key, end_key;
  long partial;  // where its unfinished result goes, in floats; -1: it is the whole
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<std::pair<long, long>> reductions;  // pieces [first, end) that belong together
  long partial_floats = 0;
};

inline long partial_row(long dim) { return dim + 2; }  // weighted values, maximum, sum

template <typename T>
Plan plan(const Attention<T>& a) {
  Plan result;
  long most = std::max(1L, QUERY_ROWS / a.group());
  for (long s = 0; s < a.sequences; s++) {
    long count = a.starts[s + 1] - a.starts[s], past = a.lengths[s] - count;
    for (long first = 0; first < count; first += most) {
      long queries = std::min(most, count - first), end = past + first + queries;
      for (long head = 0; head < a.kv_heads; head++) {
        long begin = long(result.pieces.size());
        for (long key = 0; key < end; key += SPLIT) {
          bool whole = end <= SPLIT;
          result.pieces.push_back({s, head, first, queries, key, std::min(key + SPLIT, end), whole ? -1 : result.partial_floats});
          if (!whole) result.partial_floats += queries * a.group() * partial_row(a.dim);
        }
        if (end > SPLIT) result.reductions.emplace_back(begin, long(result.pieces.size()));
      }
    }
  }
  return result;
}

template <typename T>
void rotate_and_write(const Attention<T>& a, long token) {
  const T* row = a.qkv + token * (a.heads + 2 * a.kv_heads) * a.dim;
  const float *c = a.cosines + a.positions[token] * a.dim, *s = a.sines + a.positions[token] * a.dim;
  long middle = a.dim / 2, block = a.slots[token] / BLOCK, lane = a.slots[token] % BLOCK;
  float scale = 1.0f / std::sqrt(float(a.dim));
  auto rotated = [&](const T* x, long i) {
    return i < middle ? widen(x[i]) * c[i] - widen(x[i + middle]) * s[i] : widen(x[i]) * c[i] + widen(x[i - middle]) * s[i];
  };
  for (long h = 0; h < a.heads; h++, row += a.dim) {
    float* to = a.queries + (token * a.heads + h) * a.dim;
    for (long i = 0; i < middle; i++) to[i] = rotated(row, i) * scale;
    for (long i = middle; i < a.dim; i++) to[i] = rotated(row, i) * scale;
  }
  for (long h = 0; h < a.kv_heads; h++, row += a.dim) {
    T* page = a.key_page(h, block) + lane;
    for (long i = 0; i < a.dim; i++) store(page + i * BLOCK, rotated(row, i));
  }
  for (long h = 0; h < a.kv_heads; h++, row += a.dim) memcpy(a.value_page(h, block) + lane * a.dim, row, a.dim * sizeof(T));
}

// Rows of a piece that are computed together, and the state of their softmax.
template <typename T, int R>
struct RowTile {
  const Attention<T>& a;
  const Piece& piece;
  long first_row, count;
  float *query, *sums;  // [dim][R], [R][dim]
  float maximum[R], total[R];
  long limit[R];  // keys that a row may see

  RowTile(const Attention<T>& attention, const Piece& of, long first, float* scratch)
      : a(attention), piece(of), first_row(first), count(std::min(long(R), of.queries * attention.group() - first)), query(scratch),
        sums(scratch + R * attention.dim) {
    long past = a.lengths[piece.sequence] - (a.starts[piece.sequence + 1] - a.starts[piece.sequence]);
    for (long r = 0; r < R; r++) {
      long row = first_row + std::min(r, count - 1), q = piece.first_query + row / a.group();
      const float* from =
          a.queries + ((a.starts[piece.sequence] + q) * a.heads + piece.head * a.group() + row % a.group()) * a.dim;
      for (long d = 0; d < a.dim; d++) query[d * R + r] = from[d];
      maximum[r] = -std::numeric_limits<float>::infinity();
      total[r] = 0;
      limit[r] = std::min(past + q + 1, piece.end_key);
    }
    std::fill(sums, sums + R * a.dim, 0.0f);
  }

  static long scratch_floats(long dim) { return 2 * R * dim; }

  void step(long key) {
    if (key >= limit[R - 1]) return;  // the last row sees the most
    long end = std::min(key + KEY_TILE, piece.end_key);
    const int* table = a.table + piece.sequence * a.table_width;
    float weights[R][KEY_TILE];
    for (long at = key; at < end; at += BLOCK) scores(a.key_page(piece.head, table[at / BLOCK]), weights, at - key);
    float rescale[R];
    for (int r = 0; r < R; r++) rescale[r] = soften(weights[r], key, end, r);
    for (long d = 0; d < a.dim; d += 2 * LANES) {
      if (d + LANES < a.dim)
        accumulate<2>(weights, rescale, key, end, table, d);
      else
        accumulate<1>(weights, rescale, key, end, table, d);
    }
  }

  void scores(const T* page, float (*weights)[KEY_TILE], long at) const {
    vec dots[R] = {};
    const float* q = query;
    for (long d = 0; d < a.dim; d++, q += R) {
      vec k = load(page + d * BLOCK);
      for (int r = 0; r < R; r++) dots[r] += q[r] * k;
    }
    for (int r = 0; r < R; r++) store(weights[r] + at, dots[r]);
  }

  // Scores to weights relative to the row's new maximum; returns by how much what was summed so far shrinks.
  float soften(float* w, long key, long end, int r) {
    long seen = std::clamp(limit[r] - key, 0L, end - key);
    long padded = (end - key + BLOCK - 1) / BLOCK * BLOCK;
    for (long i = seen; i < padded; i++) w[i] = -std::numeric_limits<float>::infinity();
    vec top = splat(maximum[r]);
    for (long i = 0; i < padded; i += LANES) {
      vec s = load(w + i);
      top = s > top ? s : top;
    }
    float now = largest(top);
    if (now == -std::numeric_limits<float>::infinity()) {
      for (long i = 0; i < padded; i++) w[i] = 0;
      return 1;
    }
    float shrink = std::exp(maximum[r] - now);
    vec added = {};
    for (long i = 0; i < padded; i += LANES) {
      vec p = exponential(load(w + i) - now);
      store(w + i, p);
      added += p;
    }
    total[r] = total[r] * shrink + sum(added);
    maximum[r] = now;
    return shrink;
  }

  template <int V>
  void accumulate(const float (*weights)[KEY_TILE], const float* rescale, long key, long end, const int* table, long d) {
    vec acc[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * a.dim + d + v * LANES) * rescale[r];
    for (long at = key; at < end; at += BLOCK) {
      const T* row = a.value_page(piece.head, table[at / BLOCK]) + d;
      const long keys = std::min(long(BLOCK), end - at), offset = at - key;
      for (long i = 0; i < keys; i++, row += a.dim) {
        vec x[V];
        for (int v = 0; v < V; v++) x[v] = load(row + v * LANES);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < V; v++) acc[r][v] += weights[r][offset + i] * x[v];
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(sums + r * a.dim + d + v * LANES, acc[r][v]);
  }

  void finish(float* partials) const {
    for (long r = 0; r < count; r++) {
      const float* from = sums + r * a.dim;
      if (piece.partial >= 0) {
        float* to = partials + piece.partial + (first_row + r) * partial_row(a.dim);
        memcpy(to, from, a.dim * sizeof(float));
        to[a.dim] = maximum[r];
        to[a.dim + 1] = total[r];
      } else {
        write_row(a, piece, first_row + r, from, 1.0f / total[r]);
      }
    }
  }
};

template <typename T>
void write_row(const Attention<T>& a, const Piece& piece, long row, const float* sums, float scale) {
  long token = a.starts[piece.sequence] + piece.first_query + row / a.group(), head = piece.head * a.group() + row % a.group();
  T* to = a.out + (token * a.heads + head) * a.dim;
  for (long d = 0; d < a.dim; d += LANES) store(to + d, load(sums + d) * scale);
}

template <typename T, int R>
void attend_tiles(const Attention<T>& a, const Piece& piece, float* partials) {
  thread_local std::vector<float> scratch;
  long rows = piece.queries * a.group(), tiles = (rows + R - 1) / R, each = RowTile<T, R>::scratch_floats(a.dim);
  if (long(scratch.size()) < tiles * each) scratch.resize(tiles * each);
  std::vector<RowTile<T, R>> work;
  work.reserve(tiles);
  for (long i = 0; i < tiles; i++) work.emplace_back(a, piece, i * R, scratch.data() + i * each);
  for (long key = piece.first_key; key < piece.end_key; key += KEY_TILE)
    for (auto& tile : work) tile.step(key);
  for (auto& tile : work) tile.finish(partials);
}

template <typename T>
void attend(const Attention<T>& a, const Piece& piece, float* partials) {
  switch (long rows = piece.queries * a.group(); rows) {
    case 1: return attend_tiles<T, 1>(a, piece, partials);
    case 2: return attend_tiles<T, 2>(a, piece, partials);
    case 3: return attend_tiles<T, 3>(a, piece, partials);
    case 4: return attend_tiles<T, 4>(a, piece, partials);
    default: return rows <= 6 ? attend_tiles<T, 6>(a, piece, partials) : attend_tiles<T, ROWS>(a, piece, partials);
  }
}

// Join the partial results of pieces that differ in their keys only.
template <typename T>
void reduce(const Attention<T>& a, const Plan& plan, std::pair<long, long> range, float* partials) {
  const Piece& first = plan.pieces[range.first];
  for (long row = 0; row < first.queries * a.group(); row++) {
    auto part = [&](long i) { return partials + plan.pieces[i].partial + row * partial_row(a.dim); };
    float top = part(range.first)[a.dim];
    for (long i = range.first + 1; i < range.second; i++) top = std::max(top, part(i)[a.dim]);
    float total = 0, *into = part(range.first);
    for (long i = range.first; i < range.second; i++) {
      const float* from = part(i);
      float scale = std::exp(from[a.dim] - top);
      total += from[a.dim + 1] * scale;
      for (long d = 0; d < a.dim; d++) into[d] = (i == range.first ? 0 : into[d]) + from[d] * scale;
    }
    write_row(a, first, row, into, 1.0f / total);
  }
}

}  // namespace headrace
