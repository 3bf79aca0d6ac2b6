"""Lets a reward function ask a judge over HTTP: post JSON and get JSON, with retries, back-off and one time limit.

Use :func:`ask` in a plain reward function, and :func:`ask_async` in an ``async def`` function, which can wait for many answers at
the same time.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import random
import socket as socket_module
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from verl_memopt.errors import RewardError
from verl_memopt.observe.secrets import hide_shapes

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which another attempt may succeed."""

LARGEST_ANSWER_BYTES = 16 << 20
PART_BYTES = 1 << 16
QUOTED_CHARACTERS = 200
MOST_THREADS = 1024


@dataclass(frozen=True)
class Patience:
    limit_seconds: float = 45.0
    """Longest time of a request with all its attempts. Keep it below ``custom_reward_function.timeout_seconds``."""
    attempt_seconds: float = 15.0
    """Longest time of one attempt."""
    attempts: int = 4
    """Largest number of attempts."""
    backoff_seconds: float = 0.5
    """Pause after the first failed attempt. It doubles with each further attempt, and a random part of up to half is added."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers, such as Authorization."""
    name: str = "judge"
    """Name of the service in messages."""
    way_out: str = "Start the judge, or allow more time."
    """Advice in the error if the service gives no answer."""
    place: str = "the reward function"
    """Where the address and the headers are set, for errors."""
    largest_bytes: int = LARGEST_ANSWER_BYTES
    """Most bytes of an answer."""


class LongAnswerError(RewardError):
    """An answer is longer than ``Patience.largest_bytes``. Another attempt would not help."""


class _PassingError(Exception):
    """An attempt failed, and another one may succeed. The arguments are the reason and the shortest pause in seconds."""


CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def ask(url: str, body: Any, patience: Patience = Patience(), pause: Callable[[float], None] = time.sleep) -> Any:
    """Post a body as JSON and return the JSON of the answer.

    Args:
        url: Address of the judge, http or https.
        body: Anything that JSON can hold.
        patience: Time limits, attempts and headers.
        pause: Called with the seconds to wait between attempts.

    Raises:
        RewardError: The judge gave no answer within the limits, or refused the request. The message has the number of attempts
            and the last failure.
        LongAnswerError: The answer is too long.
    """
    text = json.dumps(body).encode()
    end = time.monotonic() + patience.limit_seconds
    last, attempts = "", 0
    while attempts < patience.attempts and (left := end - time.monotonic()) > 0:
        attempts += 1
        try:
            return _attempt(url, text, patience, min(patience.attempt_seconds, left))
        except _PassingError as problem:
            last, pause_seconds = problem.args
            wait = max(patience.backoff_seconds * 2 ** (attempts - 1) * random.uniform(1, 1.5), pause_seconds)
        if attempts < patience.attempts:
            if wait >= end - time.monotonic():
                break
            pause(wait)
    raise _error(
        f"the {patience.name} at {url} gave no answer in {attempts} attempt{'s' if attempts > 1 else ''} and at most "
        f"{patience.limit_seconds:g} s. The last one failed: {last}. {patience.way_out}"
    )


def _error(text: str, kind: type[RewardError] = RewardError) -> RewardError:
    # The address or the answer may contain a key or a token, so these are hidden. The text becomes one line.
    return kind(hide_shapes(" ".join(text.split())))


async def ask_async(url: str, body: Any, patience: Patience = Patience()) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads(), lambda: ask(url, body, patience))


@cache
def _threads() -> ThreadPoolExecutor:
    # A thread starts only when no other is free.
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="judge")


def _attempt(url: str, text: bytes, patience: Patience, seconds: float) -> Any:
    # _PassingError means that another attempt may succeed, RewardError that none can.
    end = time.monotonic() + seconds
    connection = _prepared(url, len(text), patience, seconds)
    try:
        with closing(connection):
            connection.endheaders(text)
            # The answer is read through a stream with a deadline, so that slow headers cannot exceed the limit either.
            with closing(connection.sock) as socket:
                connection.sock = _Bounded(socket, end)
                answer = connection.getresponse()
                received = _read(answer, patience.largest_bytes)
        if len(received) > patience.largest_bytes:
            raise _error(
                f"the {patience.name} at {url} answered with over {patience.largest_bytes} bytes. Make it answer with less.",
                LongAnswerError,
            )
        if answer.status // 100 == 2:
            return json.loads(received)
    except TimeoutError as error:
        raise _PassingError(f"no answer within {seconds:.3g} s", 0.0) from error
    except (OSError, http.client.HTTPException) as error:
        raise _PassingError(f"{type(error).__name__}: {error}", 0.0) from error
    except (ValueError, RecursionError) as error:
        raise _PassingError(f"its answer is no JSON ({error})", 0.0) from error
    quoted = " ".join(received[: 4 * QUOTED_CHARACTERS].decode(errors="replace").split())[:QUOTED_CHARACTERS]
    reason = f"HTTP status {answer.status} {answer.reason}{f' ({quoted})' if quoted else ''}"
    if answer.status not in PASSING_STATUS:
        # No redirection is followed, because the headers, which may hold a secret, would be sent to the new address.
        elsewhere = f", which names {moved[:QUOTED_CHARACTERS]}" if (moved := answer.getheader("Location", "")) else ""
        raise _error(
            f"the {patience.name} at {url} refused the request: {reason}{elsewhere}. Correct the address or what is sent."
        )
    named = answer.getheader("Retry-After", "")
    raise _PassingError(reason, float(named) if named.isdecimal() and named.isascii() else 0.0)


def _prepared(url: str, length: int, patience: Patience, seconds: float) -> http.client.HTTPConnection:
    """Return a connection with the prepared headers of a request. Nothing is sent yet.

    Raises:
        RewardError: HTTP cannot send the address or a header. The message hides the value of a header, which may be a secret.
    """
    headers = {"Content-Type": "application/json", "Content-Length": length, "Connection": "close", **patience.headers}
    try:
        place = urlsplit(url)
        if place.scheme not in CONNECTIONS or not place.hostname or (place.port or 1) < 1:
            raise ValueError("it is no http or https URL")
        place.hostname.encode("idna")
        if "@" in place.netloc:
            raise ValueError("it contains a user or a password, which belong in the header Authorization")
        connection = CONNECTIONS[place.scheme](place.netloc, timeout=seconds)
        connection.putrequest(
            "POST", urlunsplit(("", "", place.path or "/", place.query, "")), skip_host="Host" in patience.headers
        )
    except (ValueError, http.client.InvalidURL) as error:
        raise _error(f"the {patience.name}'s address {url!r} cannot be used: {error}. Correct it in {patience.place}.") from error
    for name, value in headers.items():
        try:
            connection.putheader(name, value)
        except (ValueError, TypeError):
            # The cause is not chained, because its text has the value.
            raise _error(
                f"the {patience.name}'s header {name!r} cannot be sent: it must be one line of Latin-1 text. Correct it in "
                f"{patience.place}."
            ) from None
    return connection


class _Bounded(io.RawIOBase):
    """A socket for ``http.client`` with a deadline for the whole answer, even if the answer arrives byte by byte."""

    def __init__(self, socket: socket_module.socket, end: float) -> None:
        self._socket, self._end = socket, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None: ...

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._socket.recv_into(buffer)


def _read(answer: http.client.HTTPResponse, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > most:
            return b"".join(parts)
    # The server announced more bytes than it sent.
    if answer.length:
        raise OSError("the answer ended early")
    return b"".join(parts)
