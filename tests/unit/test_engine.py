"""The step loop: what comes in between steps, what goes out after each, and that one bad step is not the end of the news."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.engine import Engine, StepReport
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import Draw, Progress, Sequence, StepOutput, StepPlan
from shared.messages import Sampling


class SlowRunner:
    """Samples token 7; every step waits until the test lets it go."""

    def __init__(self) -> None:
        self.plans: list[list[str]] = []
        self.gate = threading.Semaphore(0)
        self.broken = False

    def run(self, plan: StepPlan) -> StepOutput:
        self.plans.append([entry.sequence.request for entry in plan.entries])
        self.gate.acquire()
        if self.broken:
            raise ArithmeticError("the device fell over")
        return StepOutput([Draw(7) for _ in plan.sampled])


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner()


@pytest.fixture
def reports() -> list[StepReport]:
    return []


@pytest.fixture
def engine(runner: SlowRunner, reports: list[StepReport]) -> Engine:
    scheduler = Scheduler(BlockPool(16, 4), slots=4, step_tokens=32, context_tokens=64)
    one = Engine(scheduler, runner, reports.append)
    one.start()
    return one


def sequence(request: str, most: int = 5) -> Sequence:
    return Sequence(request, 0, "g", [1, 2, 3], 3, most, Sampling(seed=0), b"0" * 16, 0.0)


def until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def progress(reports: list[StepReport], request: str) -> list[Progress]:
    return [one for report in reports for one in report.progress if one.request == request]


def test_a_cancelled_sequence_is_in_no_later_step(engine: Engine, runner: SlowRunner, reports: list[StepReport]) -> None:
    for request in ("stays", "goes"):
        engine.submit(sequence(request))
    until(lambda: runner.plans)
    runner.gate.release()
    until(lambda: (len(runner.plans) == 2 and set(runner.plans[1]) == {"stays", "goes"}) or len(runner.plans) > 2)
    engine.cancel("goes", 0)  # while a step runs
    running = len(runner.plans)
    runner.gate.release(20)
    until(lambda: progress(reports, "stays") and progress(reports, "stays")[-1].finish)
    assert all("goes" not in plan for plan in runner.plans[running:])
    assert progress(reports, "goes")[-1].finish == "cancelled"
    assert len(progress(reports, "goes")) <= running + 1
    until(lambda: engine.load.blocks_free == 16)
    engine.stop()


def test_only_attempts_up_to_the_cancelled_one_end(engine: Engine, runner: SlowRunner, reports: list[StepReport]) -> None:
    newer = sequence("r", most=2)
    newer.attempt = 3
    engine.submit(newer)
    engine.cancel("r", 2)
    runner.gate.release(20)
    until(lambda: progress(reports, "r") and progress(reports, "r")[-1].finish)
    assert progress(reports, "r")[-1].finish == "length"
    engine.stop()


def test_what_never_fits_is_reported(engine: Engine, runner: SlowRunner, reports: list[StepReport]) -> None:
    engine.submit(sequence("large", most=500))
    until(lambda: progress(reports, "large"))
    assert (reports[0].progress[0].finish, reports[0].progress[0].error) == ("error", "kv_capacity")
    engine.stop()


def test_a_failing_step_ends_everything_with_an_error(engine: Engine, runner: SlowRunner, reports: list[StepReport]) -> None:
    runner.broken = True
    engine.submit(sequence("a"))
    engine.submit(sequence("b"))
    runner.gate.release(5)
    until(lambda: engine.failed and progress(reports, "a") and progress(reports, "b"))
    assert {one.error for one in progress(reports, "a") + progress(reports, "b")} == {"worker_failed"}


def test_a_hanging_step_stops_the_beat(engine: Engine, runner: SlowRunner) -> None:
    time.sleep(0.5)
    assert engine.seconds_since_beat() < 0.45  # idle, it beats
    engine.submit(sequence("a"))
    until(lambda: engine.seconds_since_beat() > 0.5)
    runner.gate.release(20)
    until(lambda: engine.seconds_since_beat() < 0.3)
    engine.stop()


def test_snapshot_stands_after_the_events_so_far(engine: Engine, runner: SlowRunner, reports: list[StepReport]) -> None:
    runner.gate.release(20)
    engine.submit(sequence("a"))
    until(lambda: progress(reports, "a") and progress(reports, "a")[-1].finish)
    seen: list[tuple[int, list[bytes]]] = []
    engine.snapshot(lambda hashes: seen.append((len(reports), hashes)))
    until(lambda: seen)
    stored = [name for report in reports[: seen[0][0]] for name in report.stored]
    assert set(seen[0][1]) == set(stored)
    assert stored
    engine.stop()
