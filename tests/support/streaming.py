"""A small streaming client that keeps every chunk, its time, and can vanish at will."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.stack import KEY


@dataclass
class Answer:
    """What one request brought back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False
    body: Any = None
    sent: float = 0.0
    ended: float = 0.0

    @property
    def text(self) -> str:
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for chunk in self.chunks
            for choice in chunk["choices"]
        )

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice["finish_reason"] for chunk in self.chunks for choice in chunk["choices"] if choice["finish_reason"]]
        return reasons[0] if len(reasons) == 1 else None

    @property
    def usage(self) -> dict[str, Any]:
        return next(chunk["usage"] for chunk in reversed(self.chunks) if chunk.get("usage"))


async def stream(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], *, vanish_after: int | None = None) -> Answer:
    """Stream a request; `vanish_after` closes the connection after so many chunks."""
    answer = Answer(sent=time.monotonic())
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    async with session.post(url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}) as response:
        answer.status, answer.headers = response.status, dict(response.headers)
        if response.status != 200:
            answer.body = await response.json()
            answer.ended = time.monotonic()
            return answer
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                answer.done = True
            elif line.startswith(b"data: "):
                answer.chunks.append(json.loads(line[6:]))
                answer.times.append(time.monotonic())
                if len(answer.chunks) == vanish_after:
                    response.close()
                    break
    answer.ended = time.monotonic()
    return answer
