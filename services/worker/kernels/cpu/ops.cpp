// The operators as torch sees them: checks, allocation, and the sharing of work among torch's threads. The arithmetic is in the headers.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>

#include "attention.h"
#include "linear.h"
#include "norm.h"

namespace headrace {
namespace {

using at::Tensor;

constexpr long ROW_CHUNK = 8 * TILE_ROWS;

// Threads take the next unit when they are free: one that lost its core to another process holds up nobody.
template <typename F>
void share(long units, const F& work) {
  long threads = std::min(long(at::get_num_threads()), units);
  if (threads <= 1) {
    for (long i = 0; i < units; i++) work(i);
    return;
  }
  std::atomic<long> next{0};
  at::parallel_for(0, threads, 1, [&](long, long) {
    for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) work(i);
  });
}

template <typename T>
T* data(const Tensor& t) {
  return reinterpret_cast<T*>(t.data_ptr());
}

void check(const Tensor& t, const char* name, at::ScalarType type) {
  TORCH_CHECK(t.device().is_cpu() && t.is_contiguous() && t.scalar_type() == type, name, ": a contiguous CPU tensor of ", type, " is needed");
}

template <typename F>
void by_type(const Tensor& t, const F& f) {
  if (t.scalar_type() == at::kFloat)
    f(float{});
  else if (t.scalar_type() == at::kBFloat16)
    f(bf16{});
  else
    TORCH_CHECK(false, "float32 or bfloat16 is needed, not ", t.scalar_type());
}

// The rows of x as `multiply` takes them.
template <typename T>
const Row<T>* rows_of(const Tensor& x) {
  if constexpr (std::is_same_v<T, Row<T>>) {
    return data<T>(x);
  } else {
    thread_local std::vector<float> scratch;
    long count = x.numel(), chunk = 1 << 15, whole = count / LANES * LANES;
    if (long(scratch.size()) < count) scratch.resize(count);
    const T* from = data<T>(x);
    float* to = scratch.data();
    share((count + chunk - 1) / chunk, [&](long i) {
      long end = std::min((i + 1) * chunk, whole);
      for (long j = i * chunk; j < end; j += LANES) store(to + j, load(from + j));
    });
    for (long j = whole; j < count; j++) to[j] = widen(from[j]);
    return to;
  }
}

template <typename F>
void over_panels(long panels, long rows, const F& work) {
  long chunks = (rows + ROW_CHUNK - 1) / ROW_CHUNK;
  share(panels * chunks, [&](long i) {
    long first = i % chunks * ROW_CHUNK;
    work(i / chunks, first, std::min(ROW_CHUNK, rows - first));
  });
}

void check_product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t panels) {
  check(x, "x", packed.scalar_type());
  check(packed, "packed", packed.scalar_type());
  long together = x.scalar_type() == at::kBFloat16 ? 2 : 1;
  TORCH_CHECK(packed.dim() == 3 && packed.size(0) == panels && packed.size(1) == (x.size(1) + together - 1) / together &&
                  packed.size(2) == PANEL * together,
              "packed weight of another shape");
  if (bias) check(*bias, "bias", x.scalar_type());
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features, bool wide) {
  check_product(x, packed, bias, (features + PANEL - 1) / PANEL);
  TORCH_CHECK(!(wide && bias), "a wide product has no bias");
  long rows = x.size(0), in = x.size(1), panel = packed.size(1) * packed.size(2);
  Tensor out = at::empty({rows, features}, wide ? x.options().dtype(at::kFloat) : x.options());
  by_type(x, [&](auto type) {
    using T = decltype(type);
    const T* weight = data<T>(packed);
    const Row<T>* given = rows_of<T>(x);
    over_panels(packed.size(0), rows, [&](long p, long first, long count) {
      const Row<T>* from = given + first * in;
      if (wide)
        linear_panel<T, float>(from, count, weight + p * panel, nullptr, in, data<float>(out) + first * features, features, p * PANEL);
      else
        linear_panel<T, T>(from, count, weight + p * panel, bias ? data<T>(*bias) : nullptr, in, data<T>(out) + first * features, features, p * PANEL);
    });
  });
  return out;
}

Tensor gated_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t features) {
  check_product(x, packed, bias, (features + LANES - 1) / LANES);
  long rows = x.size(0), in = x.size(1), panel = packed.size(1) * packed.size(2);
  Tensor out = at::empty({rows, features}, x.options());
  by_type(x, [&](auto type) {
    using T = decltype(type);
    const Row<T>* given = rows_of<T>(x);
    over_panels(packed.size(0), rows, [&](long p, long first, long count) {
      gated_panel<T, T>(given + first * in, count, data<T>(packed) + p * panel, bias ? data<T>(*bias) : nullptr, in, data<T>(out) + first * features, features,
                        p * LANES);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double epsilon) {
  check(x, "x", weight.scalar_type());
  if (residual) check(*residual, "residual", x.scalar_type());
  long rows = x.size(0), size = x.size(1), chunk = std::max(1L, (1L << 14) / size);
  Tensor out = at::empty_like(x), total = residual ? at::empty_like(x) : x;
  by_type(x, [&](auto type) {
    using T = decltype(type);
    share((rows + chunk - 1) / chunk, [&](long i) {
      for (long r = i * chunk; r < std::min(rows, (i + 1) * chunk); r++)
        add_norm_row<T>(data<T>(x) + r * size, residual ? data<T>(*residual) + r * size : nullptr, data<T>(weight), size, float(epsilon),
                        data<T>(out) + r * size, data<T>(total) + r * size);
    });
  });
  return {out, total};
}

Tensor norm(const Tensor& x, const Tensor& weight, double epsilon) { return std::get<0>(add_norm(x, std::nullopt, weight, epsilon)); }

Tensor attention(const Tensor& qkv, const Tensor& cosines, const Tensor& sines, const Tensor& positions, const Tensor& slots, const Tensor& starts,
                 const Tensor& lengths, const Tensor& table, Tensor keys, Tensor values) {
  check(qkv, "qkv", values.scalar_type());
  check(keys, "keys", values.scalar_type());
  check(values, "values", values.scalar_type());
  for (const Tensor* t : {&cosines, &sines}) check(*t, "rope", at::kFloat);
  for (const Tensor* t : {&positions, &slots}) check(*t, "positions or slots", at::kLong);
  for (const Tensor* t : {&starts, &lengths, &table}) check(*t, "starts, lengths or block table", at::kInt);
  long kv_heads = keys.size(0), blocks = keys.size(1), dim = keys.size(2), heads = qkv.size(1) / dim - 2 * kv_heads;
  TORCH_CHECK(keys.size(3) == BLOCK && dim % LANES == 0 && heads % kv_heads == 0, "a cache of another shape");
  Tensor out = at::empty({qkv.size(0), heads * dim}, qkv.options());
  thread_local std::vector<float> scratch;
  by_type(qkv, [&](auto type) {
    using T = decltype(type);
    Attention<T> a{data<T>(qkv), data<float>(cosines), data<float>(sines), data<int64_t>(positions), data<int64_t>(slots), data<int>(starts),
                   data<int>(lengths), data<int>(table), lengths.size(0), qkv.size(0), table.size(1), heads, kv_heads, dim, blocks,
                   data<T>(keys), data<T>(values), data<T>(out), nullptr};
    Plan todo = plan(a);
    long queries = a.tokens * heads * dim;
    if (long(scratch.size()) < queries + todo.partial_floats) scratch.resize(queries + todo.partial_floats);
    a.queries = scratch.data();
    float* partials = scratch.data() + queries;
    constexpr long chunk = 16;
    share((a.tokens + chunk - 1) / chunk, [&](long i) {
      for (long t = i * chunk; t < std::min(a.tokens, (i + 1) * chunk); t++) rotate_and_write(a, t);
    });
    share(long(todo.pieces.size()), [&](long i) { attend(a, todo.pieces[i], partials); });
    share(long(todo.reductions.size()), [&](long i) { reduce(a, todo, todo.reductions[i], partials); });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(headrace, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int features, bool wide) -> Tensor", linear);
  m.def("gated_linear(Tensor x, Tensor packed, Tensor? bias, int features) -> Tensor", gated_linear);
  m.def("norm(Tensor x, Tensor weight, float epsilon) -> Tensor", norm);
  m.def("add_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
        [](const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon) { return add_norm(x, residual, weight, epsilon); });
  m.def("attention(Tensor qkv, Tensor cosines, Tensor sines, Tensor positions, Tensor slots, Tensor starts, Tensor lengths, Tensor table, "
        "Tensor(a!) keys, Tensor(b!) values) -> Tensor",
        attention);
}

}  // namespace headrace
