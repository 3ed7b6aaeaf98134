"""A small streaming chat in the terminal: a client of the HTTP API like any other, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from typing import TypedDict
from urllib.parse import urlsplit

from services.local.state import LaunchError

SILENCE_SECONDS = 120.0


class Message(TypedDict):
    """One turn."""

    role: str
    content: str


class Chat:
    """Holds the conversation; each answer is written to standard output as it comes."""

    def __init__(self, url: str, key: str, max_tokens: int) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https") or not url.isprintable():
            raise LaunchError(f"not an http URL: {url}")
        if not key.isascii() or not key.isprintable():
            raise LaunchError("the API key has characters that no key has")
        self._url = url
        self._host = host
        self._port = port
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._max_tokens = max_tokens
        self._model = ""
        self._messages: list[Message] = []

    def once(self, text: str) -> int:
        """Ask one thing. Returns the exit code.

        Raises:
            LaunchError: no answer, or an error instead of one.
        """
        self._answer(text)
        return 0

    def converse(self) -> int:
        """Read questions from standard input until it ends. Ctrl-C ends the answer that is being written."""
        terminal = sys.stdin.isatty()
        if terminal:
            print("Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr)
        while True:
            try:
                text = input("> " if terminal else "").strip()
            except EOFError:
                print()
                return 0
            if not text:
                continue
            try:
                self._answer(text)
            except KeyboardInterrupt:
                print()

    def _answer(self, text: str) -> None:
        self._model = self._model or self._first_model()
        self._messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            for piece in self._stream():
                said.append(piece)
                print(piece, end="", flush=True)
        finally:
            if said:  # also what an interrupted answer had said
                self._messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self._messages.pop()
        print()

    def _first_model(self) -> str:
        response, connection = self._send("GET", "/models", None)
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise LaunchError(f"{self._url} lists no model") from None
        finally:
            connection.close()

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self._messages, "max_tokens": self._max_tokens, "stream": True}
        response, connection = self._send("POST", "/chat/completions", json.dumps(body).encode())
        try:
            for line in response:
                field, _, value = line.decode().partition(":")
                if field != "data" or value.strip() == "[DONE]":
                    continue
                event = json.loads(value)
                if "error" in event:
                    raise LaunchError(event["error"].get("message", "the stream ended with an error"))
                for choice in event.get("choices", []):
                    yield choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LaunchError(f"the stream broke: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        connection = self._class(self._host, self._port, timeout=SILENCE_SECONDS)
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise LaunchError(f"no answer from {self._url}: {error or type(error).__name__}; is `headrace up` running?") from None
        if response.status != 200:
            answer = response.read(65536)
            connection.close()
            raise LaunchError(_error_message(response.status, answer))
        return response, connection


def _error_message(status: int, answer: bytes) -> str:
    try:
        return f"{json.loads(answer)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}"
