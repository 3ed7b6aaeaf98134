"""How long a crashed process waits before its next start. Pure: the caller has the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles from `first_seconds` to `longest_seconds`; a run of `calm_seconds` or more starts it over."""

    first_seconds: float = 0.5
    longest_seconds: float = 10.0
    calm_seconds: float = 30.0
    failures: int = 0

    def after_run(self, ran_seconds: float) -> float:
        """Return the seconds to wait after a run of `ran_seconds` that ended by itself."""
        self.failures = 1 if ran_seconds >= self.calm_seconds else self.failures + 1
        # the exponent is capped: a float overflows long before a process has failed often enough
        return min(self.longest_seconds, self.first_seconds * 2.0 ** min(self.failures - 1, 32))
