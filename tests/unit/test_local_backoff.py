"""The waits between restarts."""

from __future__ import annotations

import pytest

from services.local.backoff import Backoff


def test_doubles_up_to_the_longest_wait() -> None:
    backoff = Backoff()
    assert [backoff.after_run(0.1) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_a_calm_run_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after_run(1)
    assert backoff.after_run(30) == 0.5
    assert backoff.after_run(29.9) == 1


@pytest.mark.parametrize("crashes", [1_000, 100_000])
def test_never_overflows(crashes: int) -> None:
    assert Backoff(failures=crashes).after_run(0) == 10
