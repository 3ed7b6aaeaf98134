from __future__ import annotations

from typing import Any

import pytest

from services.gateway.model import SamplingDefaults


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}, (0.6, 0.95, 20)),
        ({"temperature": 0, "top_k": 0}, (0.0, 1.0, 0)),
        ({"temperature": None, "top_p": 0, "top_k": -1}, (1.0, 1.0, 0)),
        ({"temperature": 2.5, "top_p": 1.5, "top_k": 1 << 31}, (1.0, 1.0, 0)),
        ({"temperature": True, "top_p": "0.9", "top_k": 4.0}, (1.0, 1.0, 0)),
        ({"temperature": float("nan"), "top_p": float("nan")}, (1.0, 1.0, 0)),
    ],
)
def test_sampling_defaults(generation: dict[str, Any], expected: tuple[float, float, int]) -> None:
    found = SamplingDefaults.of(generation)
    assert (found.temperature, found.top_p, found.top_k) == expected
