"""Chained block hashes: the name of a block of tokens together with everything before it.

hash(block i) = BLAKE2b-128(hash(block i-1) ‖ tokens as little-endian int32), and hash(block -1) is the salt. Two sequences share a
block's hash exactly when they share the salt and every token up to the block's end, so a hit never crosses a tenant, a model or an adapter.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256

HASH_BYTES = 16


def cache_salt(secret: bytes, namespace: str, pool: str) -> bytes:
    """Return the salt [16 bytes] of one tenant's cache `namespace` on one `pool`.

    It is keyed with a server secret, so that no client can name another's.
    """
    return hmac.new(secret, f"{len(namespace)}:{namespace}{pool}".encode(), sha256).digest()[:HASH_BYTES]


def extend_hashes(hashes: list[bytes], salt: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes` the hash of every full block of `tokens` that it lacks."""
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else salt
        hashes.append(blake2b(parent + array("i", tokens[start : start + block_size]).tobytes(), digest_size=HASH_BYTES).digest())


def block_hashes(salt: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash of every full block of `tokens`, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, salt, tokens, block_size)
    return hashes
