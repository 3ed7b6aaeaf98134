"""Every C++ operator of the CPU backend against its reference in torch, and what happens where it cannot be compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backends.cpu import load_operators
from services.worker.kernels import cpu
from services.worker.kernels.cpu import reference

DTYPES = [torch.float32, torch.bfloat16]
# bf16 results differ by the rounding of one more or one less intermediate: a few units of its 8 bits
TOLERANCE: dict[torch.dtype, Any] = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


@pytest.fixture(scope="module", autouse=True)
def ops() -> Any:
    if not load_operators():
        pytest.skip("no C++ compiler on this machine")
    return torch.ops.headrace


def some(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 24, 100])
@pytest.mark.parametrize(("features", "inputs"), [(64, 96), (33, 16), (1, 7), (100, 300)])
def test_products(ops: Any, dtype: torch.dtype, rows: int, features: int, inputs: int) -> None:
    x = some(dtype, rows, inputs, seed=1)
    weight, other = (some(dtype, features, inputs, seed=seed, scale=inputs**-0.5) for seed in (2, 3))
    bias = some(dtype, features, seed=4)
    packed = cpu.pack(weight)
    for given in (None, bias):
        expected = reference.linear(x, packed, given, features, False)
        torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight, given))
        torch.testing.assert_close(ops.linear(x, packed, given, features, False), expected, **TOLERANCE[dtype])
    wide = ops.linear(x, packed, None, features, True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, torch.nn.functional.linear(x.float(), weight.float()), rtol=1e-4, atol=1e-5)
    gated = cpu.pack_gated(weight, other)
    for given in (None, torch.cat([bias, bias * 2])):
        expected = reference.gated_silu(torch.nn.functional.linear(x, torch.cat([weight, other]), given))
        torch.testing.assert_close(reference.gated_linear(x, gated, given, features), expected)
        torch.testing.assert_close(ops.gated_linear(x, gated, given, features), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 576, 37])
def test_norms(ops: Any, dtype: torch.dtype, size: int) -> None:
    x, residual, weight = some(dtype, 700, size, seed=1), some(dtype, 700, size, seed=2), some(dtype, size, seed=3)
    torch.testing.assert_close(ops.norm(x, weight, 1e-5), reference.norm(x, weight, 1e-5), **TOLERANCE[dtype])
    normed, total = ops.add_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **TOLERANCE[dtype])


def scattered(dtype: torch.dtype, sequences: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, seed: int) -> list[torch.Tensor]:
    """Arguments of `attention` for sequences of (new tokens, length) on shuffled pages; unwritten slots of the cache hold NaN."""
    chance = random.Random(seed)
    counts = [-(-length // cpu.LANES) for _, length in sequences]
    ids = chance.sample(range(sum(counts) + 3), sum(counts))
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    keys = torch.full((kv_heads, sum(counts) + 3, dim, cpu.LANES), float("nan"), dtype=dtype)
    values = torch.full((kv_heads, sum(counts) + 3, cpu.LANES, dim), float("nan"), dtype=dtype)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for i, (new, length) in enumerate(sequences):
        pages = [ids.pop() for _ in range(counts[i])]
        table[i, : len(pages)] = torch.tensor(pages)
        where = [(pages[p // cpu.LANES], p % cpu.LANES) for p in range(length)]
        for p, (page, lane) in enumerate(where[: length - new]):
            keys[:, page, :, lane] = some(dtype, kv_heads, dim, seed=seed + 2 * p)
            values[:, page, lane] = some(dtype, kv_heads, dim, seed=seed + 2 * p + 1)
        positions += range(length - new, length)
        slots += [page * cpu.LANES + lane for page, lane in where[length - new :]]
        starts.append(len(positions))
    angles = torch.rand(4096, dim // 2, generator=torch.Generator().manual_seed(seed)) * 6
    return [
        some(dtype, len(positions), (heads + 2 * kv_heads) * dim, seed=seed),
        torch.cat([angles.cos()] * 2, 1),
        torch.cat([angles.sin()] * 2, 1),
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for _, length in sequences], dtype=torch.int32),
        table,
        keys,
        values,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 80), (14, 2, 16)])
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(1, 16), (1, 17), (1, 15)],
        [(1, 3000)],  # split over threads
        [(5, 900), (1, 1200)],  # split, several queries
        [(200, 200)],
        [(1, 65), (33, 33), (40, 170), (2, 64), (1, 1)],  # decodes, a whole prefill and a chunk of one, mixed
    ],
)
def test_attention(ops: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, sequences: list[tuple[int, int]]) -> None:
    given = scattered(dtype, sequences, heads, kv_heads, dim, seed=5)
    also = [one.clone() for one in given]
    expected = reference.attention(*also)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        torch.testing.assert_close(ops.attention(*given), expected, **TOLERANCE[dtype])
    torch.testing.assert_close(given[8], also[8], **TOLERANCE[dtype], equal_nan=True)
    assert torch.equal(given[9].view(torch.uint8), also[9].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_to_the_bit_whoever_is_in_the_batch(ops: Any, dtype: torch.dtype) -> None:
    alone = scattered(dtype, [(3, 1500)], 9, 3, 64, seed=1)
    crowd = scattered(dtype, [(3, 1500), (1, 90), (200, 700)], 9, 3, 64, seed=1)
    crowd[0][:3] = alone[0]
    expected = ops.attention(*alone)
    assert torch.equal(ops.attention(*crowd)[:3], expected)
    one = scattered(dtype, [(1, 1500)], 9, 3, 64, seed=1)  # the same sequence, whose other two tokens came in an earlier step
    one[0][:] = alone[0][2:]
    one[7:] = alone[7:]
    assert torch.equal(ops.attention(*one), expected[2:])
    x, weight, other = some(dtype, 600, 300, seed=1), some(dtype, 100, 300, seed=2), some(dtype, 100, 300, seed=3)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda rows: ops.linear(rows, cpu.pack(weight), None, 100, False),
        lambda rows: ops.linear(rows, cpu.pack(weight), None, 100, True),
        lambda rows: ops.gated_linear(rows, cpu.pack_gated(weight, other), None, 100),
    ]
    for product in products:
        expected = product(x)
        for first, rows in [(7, 1), (0, 2), (3, 12), (588, 12), (101, 13), (50, 40), (0, 512)]:
            assert torch.equal(product(x[first : first + rows].contiguous()), expected[first : first + rows])


def test_odd_arguments_are_refused(ops: Any) -> None:
    x, packed = some(torch.float32, 2, 16), cpu.pack(some(torch.float32, 40, 16))
    for bad in (x.double(), x[:, ::2], x.to(torch.bfloat16), some(torch.float32, 2, 8)):
        with pytest.raises(RuntimeError):
            ops.linear(bad, packed, None, 40, False)
    with pytest.raises(RuntimeError):
        ops.linear(x, packed, None, 80, False)


@pytest.mark.parametrize("broken", ["missing", "failing"])
def test_without_a_compiler_it_says_so(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "loaded", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "no-c++"
    if broken == "failing":
        compiler.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not load_operators()
    assert ("out of luck" if broken == "failing" else "no C++ compiler") in caplog.text
