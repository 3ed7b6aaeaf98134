"""Every message on the wire, and nothing else: typed, bounded msgpack.

Decoding validates types and sizes, so a receiver never meets a half-formed message. Each message carries the protocol version; a
field that a receiver does not know is ignored, so fields may be added (at the end, for the array-shaped ones) without a new version.
Text never appears here: prompts and outputs are token ids (rule 1 of the architecture).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20  # the NATS server's default payload limit
MAX_REQUEST_TOKENS = 1 << 18
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 512  # each counted once per way in which it can be split into tokens

Priority = Literal["interactive", "standard", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "standard", "batch")
Finish = Literal["stop", "length", "cancelled", "expired", "error"]

Id = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,63}$")]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
BlockHash = Annotated[bytes, Meta(min_length=16, max_length=16)]
MAX_TOP_LOGPROBS = 20  # OpenAI's
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
BlockHashes = Annotated[list[BlockHash], Meta(max_length=32_768)]


class MessageError(ValueError):
    """A received message is too large, malformed or of another protocol version."""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn.

    `seed` is always set: the gateway draws one for a request that has none, so that a resumed request continues its random stream.
    """

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the likeliest token's probability
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] = {}
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] = []
    min_tokens: Count = 0  # of output, before which no stop token may come
    bad_words: Annotated[list[Annotated[list[TokenId], Meta(min_length=1, max_length=64)]], Meta(max_length=MAX_BAD_WORDS)] = []
    logprobs: TopCount | None = None  # log-probabilities of the output, each with so many of the likeliest tokens
    prompt_logprobs: TopCount | None = None


class WorkRequest(Struct, frozen=True, omit_defaults=True):
    """One sequence to generate: what a gateway puts into the work queue.

    `tokens` is the prompt followed by any output that earlier attempts already delivered; `prompt_length` says where output begins,
    so output token i of the request is always `tokens[prompt_length + i]`, whichever worker made it.
    """

    version: Literal[1]
    request: Id
    attempt: Annotated[int, Meta(ge=0, le=1000)]
    gateway: Id
    pool: Id
    priority: Priority
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_REQUEST_TOKENS)]
    prompt_length: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]  # of output, counted from prompt_length
    sampling: Sampling
    salt: Annotated[bytes, Meta(min_length=16, max_length=32)]  # separates prefix caches; see shared/hashing.py
    arrived_at: float  # Unix seconds at the gateway
    start_by: float  # Unix seconds; a worker that pulls it later answers `expired`


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural log-probabilities, by the model's own logits, of a token and of the likeliest ones at its place, best first."""

    logprob: float
    top: Annotated[list[TokenId], Meta(max_length=MAX_TOP_LOGPROBS)] = []
    top_logprobs: Annotated[list[float], Meta(max_length=MAX_TOP_LOGPROBS)] = []


class Extras(Struct, frozen=True, omit_defaults=True):
    """Facts about a request that only some of its deltas carry."""

    cached_tokens: Count | None = None  # with the first output token: prompt tokens that came from the prefix cache
    queue_seconds: float | None = None  # with the first output token: from arrival at the gateway to the first scheduled step
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=4096)] = []  # of the delta's tokens, where they are wanted
    prompt_from: Count = 0  # the prompt position of `prompt_logprobs[0]`
    prompt_logprobs: Annotated[list[TokenLogprobs], Meta(max_length=8192)] = []
    error: Annotated[str, Meta(max_length=200)] | None = None  # with finish = "error": one of the codes in services/gateway/relay.py


class Delta(Struct, frozen=True, array_like=True, omit_defaults=True):
    """New output of one request in one step. `index` is the position of `tokens[0]` in the output, so gaps and repeats are detectable."""

    request: Id
    attempt: Count
    index: Count
    tokens: Annotated[list[TokenId], Meta(max_length=4096)] = []
    finish: Finish | None = None
    extras: Extras | None = None


class Frame(Struct, frozen=True, array_like=True, tag="frame"):
    """All deltas of one engine step for one gateway."""

    version: Literal[1]
    worker: Id
    step: Count
    deltas: Annotated[list[Delta], Meta(max_length=8192)]


class Accepted(Struct, frozen=True, array_like=True, tag="accepted"):
    """A worker has taken a request from the queue. Sent before the queue's acknowledgement, on the same subject as its frames."""

    version: Literal[1]
    worker: Id
    request: Id
    attempt: Count


ToGateway = Frame | Accepted


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop every attempt of a request up to and including `attempt`, and free its blocks."""

    version: Literal[1]
    request: Id
    attempt: Count


class SnapshotRequest(Struct, frozen=True, array_like=True, tag="snapshot"):
    """A router lost count of a worker's block events and wants the whole set."""

    version: Literal[1]


ToWorker = Cancel | SnapshotRequest


class WorkerState(Struct, frozen=True, omit_defaults=True, tag="worker"):
    """A worker's heartbeat. `leaving` is its goodbye: nothing more will come from this worker id (ids are minted at each start)."""

    version: Literal[1]
    worker: Id
    pool: Id
    role: Literal["both", "prefill", "decode"]
    block_size: Annotated[int, Meta(ge=1, le=1024)]  # tokens
    blocks_total: Count
    blocks_free: Count  # unreferenced: never used, or cached and evictable
    running: Count
    waiting: Count
    slots: Count  # largest batch, in sequences
    queued_prefill_tokens: Count  # tokens not yet computed, running and waiting
    context_tokens: Count  # longest prompt + output that this worker can ever hold
    prefill_tokens_per_second: float  # measured; 0 until known
    decode_tokens_per_second: float  # measured, whole batch; 0 until known
    step: Count
    healthy: bool  # the step loop has beaten lately
    draining: bool = False
    leaving: bool = False


class GatewayState(Struct, frozen=True, omit_defaults=True, tag="gateway"):
    """A gateway's heartbeat: workers drop the work of a gateway that has been silent for longer than its lease."""

    version: Literal[1]
    gateway: Id
    leaving: bool = False


FleetState = WorkerState | GatewayState


class BlockEvents(Struct, frozen=True, array_like=True, tag="events"):
    """Prefix-cache changes of one worker, in order: first `removed`, then `stored`. `sequence` rises by one from message to message."""

    version: Literal[1]
    worker: Id
    sequence: Count
    stored: BlockHashes
    removed: BlockHashes


class BlockSnapshot(Struct, frozen=True, array_like=True, tag="blocks"):
    """Part `part` of `parts` of all cached blocks of a worker as they stood after event `sequence`."""

    version: Literal[1]
    worker: Id
    sequence: Count
    part: Count
    parts: Count
    hashes: BlockHashes


BlockNews = BlockEvents | BlockSnapshot


class RouteRequest(Struct, frozen=True, omit_defaults=True):
    """Where should a prompt with these block hashes (one per full block, in order) go?"""

    version: Literal[1]
    pool: Id
    prompt_tokens: Count
    hashes: BlockHashes
    excluded: Annotated[list[Id], Meta(max_length=64)] = []


class RouteReply(Struct, frozen=True, omit_defaults=True):
    """`worker` is None when the pool's shared subject is the better choice."""

    version: Literal[1]
    worker: Id | None = None
    matched_tokens: Count = 0


_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct) -> bytes:
    """Return `message` as msgpack."""
    return _encoder.encode(message)


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    inner = msgspec.msgpack.Decoder(kind)

    def decode(payload: bytes) -> Any:
        if len(payload) > MAX_MESSAGE_BYTES:
            raise MessageError(f"message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return inner.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MessageError(f"malformed message: {error}") from None

    return decode


# Each raises MessageError, and nothing else, on bytes that are not such a message.
decode_work: Callable[[bytes], WorkRequest] = _decoder(WorkRequest)
decode_to_gateway: Callable[[bytes], ToGateway] = _decoder(ToGateway)
decode_to_worker: Callable[[bytes], ToWorker] = _decoder(ToWorker)
decode_fleet_state: Callable[[bytes], FleetState] = _decoder(FleetState)
decode_block_news: Callable[[bytes], BlockNews] = _decoder(BlockNews)
decode_route_request: Callable[[bytes], RouteRequest] = _decoder(RouteRequest)
decode_route_reply: Callable[[bytes], RouteReply] = _decoder(RouteReply)
