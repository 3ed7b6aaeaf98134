"""Logs and metrics. Label values are ids that the system minted or fixed words, never user text."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PROMPT_BUCKETS = (128, 1024, 8192)  # tokens: upper borders of the prompt-length label


def prompt_bucket(prompt_tokens: int) -> str:
    """Return the label under which latencies of prompts of this length are counted."""
    return next((f"le{border}" for border in _PROMPT_BUCKETS if prompt_tokens <= border), f"gt{_PROMPT_BUCKETS[-1]}")


class GatewayMetrics:
    """What a gateway measures. `model` is a pool id, one per served model."""

    def __init__(self, models: list[str]) -> None:
        self.registry = registry = CollectorRegistry()
        latency = ("model", "prompt")
        self.ttft = Histogram(
            "headrace_ttft_seconds", "Request received to first token relayed", latency, buckets=_SECONDS, registry=registry
        )
        self.tpot = Histogram(
            "headrace_tpot_seconds", "Mean time per output token after the first", latency, buckets=_SECONDS, registry=registry
        )
        self.queue = Histogram(
            "headrace_queue_seconds", "Request received to first scheduled step", ("model",), buckets=_SECONDS, registry=registry
        )
        self.requests = Counter("headrace_requests", "Finished requests by outcome", ("model", "outcome"), registry=registry)
        self.refused = Counter("headrace_refused", "Requests refused before any work", ("reason",), registry=registry)
        self.tokens = Counter("headrace_tokens", "Tokens of finished requests", ("model", "kind"), registry=registry)
        self.open = Gauge("headrace_open_requests", "Requests between admission and their end", ("model",), registry=registry)
        self.resumes = Counter("headrace_resumes", "Requests moved to another worker", ("reason",), registry=registry)
        self.frames_ignored = Counter("headrace_frames_ignored", "Deltas dropped by the relay", ("reason",), registry=registry)
        self.usage_lost = Counter("headrace_usage_lost", "Finished requests missing in the usage totals", registry=registry)
        for model in models:  # present at zero
            for border in [*_PROMPT_BUCKETS, _PROMPT_BUCKETS[-1] + 1]:
                self.ttft.labels(model, prompt_bucket(border))
                self.tpot.labels(model, prompt_bucket(border))
            self.queue.labels(model)
            self.open.labels(model)
            for outcome in ("stop", "length", "cancelled", "error"):
                self.requests.labels(model, outcome)
            for kind in ("prompt", "cached", "completion"):
                self.tokens.labels(model, kind)
        for reason in ("queue_full", "unavailable", "timeout", "invalid", "unauthorized"):
            self.refused.labels(reason)
        for reason in ("worker_lost", "impatience"):
            self.resumes.labels(reason)
        for reason in ("unknown_request", "old_attempt", "repeat", "gap", "malformed"):
            self.frames_ignored.labels(reason)


class WorkerMetrics:
    """What a worker measures, at the step loop where it happens."""

    def __init__(self, model: str) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"headrace_worker_{name}", text, ("model",), registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"headrace_worker_{name}", text, ("model",), registry=registry).labels(model)

        self.running = gauge("running", "Sequences in the batch")
        self.waiting = gauge("waiting", "Sequences pulled but not in the batch")
        self.kv_utilisation = gauge("kv_utilisation", "Referenced blocks / all blocks")
        self.cached_blocks = gauge("cached_blocks", "Blocks in the prefix cache")
        self.batch_size = Histogram(
            "headrace_worker_batch_size", "Sequences per step", ("model",), buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256), registry=registry
        ).labels(model)
        self.step = Histogram("headrace_worker_step_seconds", "Duration of a step", ("model", "phase"), buckets=_SECONDS, registry=registry)
        self.step_prefill, self.step_decode = self.step.labels(model, "prefill"), self.step.labels(model, "decode")
        self.prefill_tokens = counter("prefill_tokens", "Prompt tokens computed")
        self.decode_tokens = counter("decode_tokens", "Output tokens sampled")
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "Prompt tokens taken from the prefix cache")
        self.prefix_query_tokens = counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache")
        self.preemptions = counter("preemptions", "Sequences preempted by recompute")
        self.refused = counter("refused", "Requests that can never fit, or came too late")


class RouterMetrics:
    """What a router measures."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.decisions = Counter("headrace_router_decisions", "Placements", ("outcome",), registry=registry)
        self.matched_tokens = Counter(
            "headrace_router_matched_tokens", "Prompt tokens that the chosen worker had cached", registry=registry
        )
        self.workers = Gauge("headrace_router_workers", "Workers with a fresh heartbeat", registry=registry)
        self.indexed_blocks = Gauge("headrace_router_indexed_blocks", "Block hashes in the prefix index", registry=registry)
        self.gaps = Counter("headrace_router_event_gaps", "Sequence gaps in block events", registry=registry)
        self.malformed = Counter("headrace_router_malformed", "Messages dropped because they could not be decoded", registry=registry)
        self.seconds = Histogram("headrace_router_decision_seconds", "Time to decide", buckets=(1e-5, 1e-4, 1e-3, 1e-2), registry=registry)
        for outcome in ("placed", "no_worker", "no_room"):
            self.decisions.labels(outcome)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))  # log.info("ready", extra={"fields": {"metrics_port": 9100}})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(service: str, level: str, style: str) -> None:
    """Log to standard error, one line per record, as JSON or plain text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(service) if style == "json" else logging.Formatter(f"%(asctime)s {service} %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "nats"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def serve_metrics(registry: CollectorRegistry, host: str, port: int, healthy: Callable[[], bool]) -> ThreadingHTTPServer:
    """Serve /metrics and /health (200 or 503) from a thread of its own, on `port` or any free one when it is 0.

    Raises:
        OSError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path == "/health":
                well = healthy()
                self._answer(200 if well else 503, json.dumps({"healthy": well, "time": time.time()}).encode(), "application/json")
            else:
                self._answer(404, b"", "text/plain")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
