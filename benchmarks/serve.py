"""Serving benchmark: each load through the whole system (HTTP, gateway, NATS, worker), and through the same engine called in process.

The two alternate, and only one of them has work at a time, so the ratio is what gateway, queue and relay cost.
usage: python -m benchmarks.serve [--model NAME] [--rounds 3] [--loads "one client,16 clients"] [--base-url URL --api-key KEY]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.loads import LOADS, Load, Result, Timing, median_by, summarise
from services.worker.engine.engine import Engine, StepReport
from services.worker.engine.sequence import Sequence
from services.worker.loading import EngineParts, build
from shared import subjects
from shared.messages import Sampling
from shared.model_files import locate
from shared.settings import Settings

START_SECONDS = 300


async def through_http(load: Load, prompts: list[list[int]], url: str, key: str, model: str) -> Result:
    """Run a load with streaming completions."""
    timings: list[Timing] = []
    cached = 0
    work = iter(prompts)

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal cached
        for prompt in work:
            sent, tokens = time.perf_counter(), []
            body = {"model": model, "prompt": prompt, "max_tokens": load.output, "temperature": 0, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            made = 0
            async with session.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RuntimeError(str(chunk)[:300])
                    usage = chunk.get("usage") or {}
                    now = time.perf_counter()
                    # a chunk may hold several tokens, or none that is visible yet
                    new = usage.get("completion_tokens", made) - made
                    tokens += [now] * new
                    made += new
                    if not chunk["choices"]:
                        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if made != load.output:
                raise RuntimeError(f"{made} tokens instead of {load.output}")
            timings.append(Timing(sent, tokens))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(load.concurrency)))
        return summarise(timings, time.perf_counter() - began, cached)


class InProcess:
    """The same engine loop, driven directly."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._done = threading.Condition()
        self._times: dict[str, list[float]] = {}
        self._finished: list[str] = []
        self._cached = 0
        self._engine = Engine(parts.scheduler, parts.runner, self._report)
        self._engine.start()

    def _report(self, report: StepReport) -> None:
        now = time.perf_counter()
        for one in report.progress:
            self._times[one.request] += [now] * len(one.tokens)
            self._cached += one.cached_tokens or 0
            if one.finish:
                with self._done:
                    self._finished.append(one.request)
                    self._done.notify()

    def run(self, load: Load, prompts: list[list[int]]) -> Result:
        """Run a load with `load.concurrency` sequences under way at any time."""
        self._cached = 0
        sent: dict[str, float] = {}
        waiting = list(reversed(prompts))
        began = time.perf_counter()

        def submit() -> None:
            request, prompt = subjects.mint("r"), waiting.pop()
            self._times[request] = []
            sent[request] = time.perf_counter()
            sampling = Sampling(seed=0, temperature=0)
            self._engine.submit(Sequence(request, 0, "g", list(prompt), len(prompt), load.output, sampling, b"s" * 16, sent[request]))

        for _ in range(load.concurrency):
            submit()
        ended = 0
        while ended < len(prompts):
            with self._done:
                self._done.wait_for(lambda: self._finished)
                finished, self._finished = self._finished, []
            ended += len(finished)
            for _ in finished:
                if waiting:
                    submit()
        return summarise([Timing(sent[request], self._times[request]) for request in sent], time.perf_counter() - began, self._cached)


@contextlib.contextmanager
def system(model: str, state_dir: Path) -> Iterator[tuple[str, str]]:
    """Run `headrace up` on a free port; yield its URL and API key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = "benchmark"
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "HEADRACE_API_KEY": key, "HEADRACE_STATE_DIR": state, "HEADRACE_PORT": str(port)}
        environment["HEADRACE_MODEL"] = str(locate(model, state_dir).path)
        process = subprocess.Popen([sys.executable, "-m", "services.cli", "up"], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            give_up_at = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
                    probe.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
                    if b" 200 " in probe.recv(100):
                        break
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError("headrace up did not become ready")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", key
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def machine() -> str:
    """Describe this machine in a line."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        name = line.split(":", 1)[1].strip()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


def table(rows: list[tuple[str, str, Result]]) -> Table:
    """Lay results out: milliseconds and tokens per second."""
    out = Table("load", "system", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "out tok/s", "cached tokens")
    for load, name, one in rows:
        times = [f"{seconds * 1e3:.1f}" for seconds in (one.ttft_p50, one.ttft_p99, one.tpot_p50, one.tpot_p99)]
        out.add_row(load, name, *times, f"{one.tokens_per_second:.1f}", str(one.cached_tokens))
    return out


def main() -> None:
    """Run, print, and write benchmarks/results/serve.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=",".join(load.name for load in LOADS))
    parser.add_argument("--base-url", help="measure a running system instead of starting one")
    parser.add_argument("--api-key", default=os.environ.get("HEADRACE_API_KEY", ""))
    options = parser.parse_args()
    loads = [load for load in LOADS if load.name in options.loads.split(",")]
    settings = Settings(model=options.model)
    folder = locate(settings.model, settings.state_dir)
    parts = build(settings)
    direct = InProcess(parts)
    running = contextlib.nullcontext((options.base_url, options.api_key)) if options.base_url else system(options.model, settings.state_dir)
    console, rows, records = Console(width=120), [], []
    with running as (url, key):
        vocabulary = parts.description.vocabulary
        warm = Load("warm up", 4, 4, 0, 64, 8)
        asyncio.run(through_http(warm, warm.prompts(vocabulary, 0), url, key, folder.name))
        direct.run(warm, warm.prompts(vocabulary, 0))
        for load in loads:
            whole, alone = [], []
            for turn in range(options.rounds):
                whole.append(asyncio.run(through_http(load, load.prompts(vocabulary, 2 * turn), url, key, folder.name)))
                alone.append(direct.run(load, load.prompts(vocabulary, 2 * turn + 1)))
            ours, engine = median_by(whole), median_by(alone)
            rows += [(load.name, "whole system", ours), (load.name, "engine in process", engine)]
            records.append({"load": asdict(load), "system": asdict(ours), "engine": asdict(engine)})
            console.print(
                f"{load.name}: throughput {ours.tokens_per_second / engine.tokens_per_second:.2f} × the engine's, "
                f"TTFT p50 {(ours.ttft_p50 - engine.ttft_p50) * 1e3:+.1f} ms, TPOT p50 {ours.tpot_p50 / engine.tpot_p50:.2f} ×"
            )
    console.print(table(rows))
    console.print(f"{folder.name}, {machine()}; median of {options.rounds} alternating rounds")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "serve.json").write_text(json.dumps({"machine": machine(), "model": folder.name, "loads": records}, indent=1))


if __name__ == "__main__":
    main()
