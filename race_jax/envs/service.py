"""A JSON service over HTTP: time-outs, retries where they are safe, and faults that say where."""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from race_jax.envs.base import EnvironmentFault

MAX_BYTES = 1 << 26
"""The longest reply that is read, in bytes."""

_START_SECONDS = 5.0
_BUSY = (408, 429)
"""Statuses below 500 that pass: too late, and too many requests at once."""


class ServiceFault(EnvironmentFault):
    """A service did not answer as it should.

    Attributes:
        status: The HTTP status, or None where there was no whole reply.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class _Passing(ServiceFault):
    """A fault that may pass: the request can be sent again if the server bears it."""


class _Unsent(_Passing):
    """No connection, so the server has seen nothing of the request."""


class Service:
    """A server that is asked by POST and GET and answers in JSON.

    A request that only reads, or that brings the server to the same state however often it is sent,
    is repeated when the connection breaks, the server is late or answers 5xx, 408 or 429. Any other
    is sent again only where no connection came about. A reply of `{"error": text}` is a fault even
    with HTTP status 200, and so is one that is no JSON.

    Args:
        address: Such as `http://127.0.0.1:8000`.
        timeout: Seconds for one reply, from the request to its last byte; above 0.
        attempts: How often a request is sent at most, at least 1.
        pause: Seconds before the second attempt; each later pause is twice as long.
        start: What to say about a server that is down, such as the command that starts it.

    Raises:
        ValueError: The address is no HTTP address, or a number is out of range.
    """

    def __init__(
        self,
        address: str,
        timeout: float = 60.0,
        attempts: int = 4,
        pause: float = 0.5,
        start: str = "",
    ):
        rule = f"the address is {address!r}; it must be like http://127.0.0.1:8000"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{rule} ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(rule)
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be above 0 seconds")
        if attempts < 1:
            raise ValueError(f"attempts is {attempts}; it must be at least 1")
        if pause < 0:
            raise ValueError(f"pause is {pause}; it must be at least 0 seconds")
        self.address = address.rstrip("/")
        self._endpoint = (parts.hostname, port or (443 if parts.scheme == "https" else 80))
        self._timeout, self._attempts, self._pause = timeout, attempts, pause
        self._start = f"; {start}" if start else ""
        # Without TLS there is nothing to verify, and the certificates take long to load.
        self._verify = ssl.create_default_context() if parts.scheme == "https" else False
        self._client = self._open()

    def check(self) -> None:
        """See at once whether a server listens.

        Nothing is asked of it: one that is busy with another client would not answer yet.

        Raises:
            EnvironmentFault: None does.
        """
        try:
            seconds = min(self._timeout, _START_SECONDS)
            socket.create_connection(self._endpoint, timeout=seconds).close()
        except OSError as error:
            raise ServiceFault(
                f"no server answers at {self.address} ({_named(error)}){self._start}"
            ) from None

    def get(self, route: str, **params: Any) -> Any:
        """The JSON that a GET brings; repeated if need be.

        Raises:
            EnvironmentFault: The service failed.
        """
        return self._ask("GET", route, None, params, again=True)

    def post(self, route: str, body: Mapping[str, Any], again: bool = False) -> Any:
        """The JSON that a POST brings.

        Args:
            route: Such as "/step".
            body: The request.
            again: Whether the request may reach the server twice without harm.

        Raises:
            EnvironmentFault: The service failed.
        """
        return self._ask("POST", route, dict(body), {}, again)

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        self._client.close()
        self._client = self._open()

    def _open(self) -> httpx.Client:
        # Proxies of the shell are not for servers that are named by their address.
        return httpx.Client(timeout=self._timeout, verify=self._verify, trust_env=False)

    def _ask(
        self,
        method: Literal["GET", "POST"],
        route: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, Any],
        again: bool,
    ) -> Any:
        where = f"{method} {self.address}{route}"
        for attempt in range(1, self._attempts + 1):
            try:
                reply = self._once(method, route, body, params, where)
            except _Passing as fault:
                if attempt == self._attempts or not (again or isinstance(fault, _Unsent)):
                    tried = f" in {attempt} attempts" if attempt > 1 else ""
                    raise ServiceFault(f"{fault}{tried}", fault.status) from None
                # Apart from each other, lest all workers come back at the same moment.
                time.sleep(self._pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
                continue
            if isinstance(reply, Mapping) and "error" in reply:
                raise ServiceFault(f"{where}: the server says {str(reply['error'])!r:.500}", 200)
            return reply
        raise AssertionError("the last attempt returns or raises")

    def _once(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, Any],
        where: str,
    ) -> Any:
        url = self.address + route
        # Escaped, so that half of a surrogate pair, which a call can hold, is sent all the same.
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        deadline = time.monotonic() + self._timeout
        held = bytearray()
        try:
            with self._client.stream(
                method, url, content=content, headers=headers, params=params or None
            ) as reply:
                for piece in reply.iter_bytes():
                    held += piece
                    # A server that sends a byte now and then never runs into httpx's time-out.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the reply does not end")
                    if len(held) > MAX_BYTES:
                        raise ServiceFault(f"{where}: the reply is over {MAX_BYTES} bytes")
                status = reply.status_code
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Unsent(f"{where}: no connection ({_named(error)}){self._start}") from None
        except httpx.TimeoutException:
            raise _Passing(f"{where}: no whole reply within {self._timeout:g} s") from None
        except httpx.RequestError as error:
            raise _Passing(f"{where}: the connection broke ({_named(error)})") from None
        return _read(bytes(held), status, where)


def _read(held: bytes, status: int, where: str) -> Any:
    text = held.decode("utf-8", errors="replace")
    if status != 200:
        kind = _Passing if status >= 500 or status in _BUSY else ServiceFault
        raise kind(f"{where}: HTTP status {status}, {text[:300]!r}", status)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServiceFault(f"{where}: the reply is no JSON but {text[:300]!r}", status) from None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
