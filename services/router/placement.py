"""The cost of giving a prompt to each worker, and the choice. Pure: loads, cache matches and the random source are passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from shared.messages import RouteRequest

Reason = Literal["placed", "no_worker", "no_room"]


@dataclass(frozen=True, slots=True)
class Load:
    """How full one worker is, placements that it has not reported yet included."""

    worker: str
    block_size: int  # tokens
    batch: int  # sequences running, waiting, and on their way
    free_slots: int  # sequences
    free_blocks: int
    queued_prefill_tokens: int
    context_tokens: int  # longest prompt + output


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a prompt goes: to the pool's shared subject when `worker` is None."""

    worker: str | None
    reason: Reason
    matched_tokens: int = 0
    new_tokens: int = 0  # prompt tokens to compute


def prompt_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many blocks the whole prompt fills, a partial one included."""
    return -(-prompt_tokens // block_size)


def has_room(load: Load, prompt_tokens: int) -> bool:
    """Whether `load` can start a prompt now: a slot, blocks for all of it, and context for at least one token of output."""
    return load.free_slots > 0 and load.free_blocks >= prompt_blocks(prompt_tokens, load.block_size) and load.context_tokens > prompt_tokens


def cost(load: Load, new_tokens: int, pending_tokens: int = 0) -> int:
    """Return the cost of computing `new_tokens` beside the batch that is there, behind the prefill that is queued (after LMetric).

    `pending_tokens` of that queue are this prompt's own prefix, being computed for another request: work that it would otherwise have
    to do itself, hence no reason to go elsewhere. Without this, requests that bring the same new prefix together would part.
    """
    return new_tokens * (1 + load.batch) + max(0, load.queued_prefill_tokens - pending_tokens)


def choose(
    request: RouteRequest,
    loads: Sequence[Load],
    matched_blocks: Mapping[str, int],
    confirmed_blocks: Mapping[str, int],
    random: Random,
) -> Decision:
    """Choose among the fresh workers of the request's pool, `loads`; by chance among those that cost the same.

    `matched_blocks` says how many leading blocks of the prompt each worker has cached or will have soon; `confirmed_blocks`, how many
    of them it has now.
    """
    allowed = [load for load in loads if load.worker not in request.excluded]
    if not allowed:
        return Decision(None, "no_worker")
    roomy = [load for load in allowed if has_room(load, request.prompt_tokens)]
    if not roomy:
        return Decision(None, "no_room")

    # the last prompt token is always computed: its logits are needed
    matched = [min(matched_blocks.get(load.worker, 0) * load.block_size, max(0, request.prompt_tokens - 1)) for load in roomy]
    pending = [hit - confirmed_blocks.get(load.worker, 0) * load.block_size for load, hit in zip(roomy, matched, strict=True)]
    costs = [cost(load, request.prompt_tokens - hit, max(0, late)) for load, hit, late in zip(roomy, matched, pending, strict=True)]
    cheapest = min(costs)
    best = random.choice([i for i, price in enumerate(costs) if price == cheapest])
    return Decision(roomy[best].worker, "placed", matched[best], request.prompt_tokens - matched[best])
