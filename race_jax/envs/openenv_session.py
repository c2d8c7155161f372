"""One session on an OpenEnv server: messages over a WebSocket, and faults that say where."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from race_jax.envs.service import MAX_BYTES, ServiceFault

# The codes are openenv-core's; another one is a fault like any that the server reports.
_REFUSED = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"
_CLOSE_SECONDS = 2.0


class LostSession(ServiceFault):
    """The session is gone, or there was none: a new one may serve."""


class Refused(Exception):
    """The server finds an action or reset options at fault, and has not carried them out."""


class Seen(NamedTuple):
    """What an environment shows.

    Attributes:
        observation: Its fields.
        reward: Of this step, finite; None if there is none.
        done: Whether the episode is over.
    """

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Session:
    """A connection, and with it an environment of its own on the server.

    Args:
        address: Of the server, such as `http://127.0.0.1:8000`.
        timeout: Seconds for the connection, and for each reply.

    Raises:
        LostSession: There is no connection.
        ValueError: The package `websockets` is not installed.
    """

    def __init__(self, address: str, timeout: float):
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ImportError:
            raise ValueError(
                "OpenEnv's servers talk over WebSockets; install the package with pip install "
                "'race-jax[openenv]'"
            ) from None
        self.where = f"ws{address.removeprefix('http').rstrip('/')}/ws"
        self._timeout, self._broken = timeout, (WebSocketException, OSError)
        self._held = contextlib.ExitStack()
        try:
            # Time-outs are kept here: a server whose step blocks it would miss its pings. Proxies
            # of the shell are not for servers that are named by their address.
            opening = connect(
                self.where,
                open_timeout=timeout,
                close_timeout=_CLOSE_SECONDS,
                ping_interval=None,
                max_size=MAX_BYTES,
                proxy=None,
            )
            self._socket = self._held.enter_context(opening)
        except self._broken as error:
            raise LostSession(f"{self.where}: no connection ({_named(error)})") from None

    def reset(self, options: Mapping[str, Any]) -> Seen:
        """Start an episode.

        Raises:
            Refused: The server takes no such options.
            EnvironmentFault: The server failed.
        """
        return self._seen(self._ask("reset", options), "reset")

    def step(self, action: Mapping[str, Any]) -> Seen:
        """Carry out an action.

        Raises:
            Refused: The server takes no such action.
            EnvironmentFault: The server failed.
        """
        return self._seen(self._ask("step", action), "step")

    def close(self) -> None:
        """Tell the server that the session is over."""
        with contextlib.suppress(*self._broken):
            self._socket.send(json.dumps({"type": "close"}))
        with contextlib.suppress(*self._broken):
            self._held.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """The data of the reply to a message."""
        where = f"{self.where}, {kind}"
        until = time.monotonic() + self._timeout
        # A server that ends a session says why before it does: that is still to be read then.
        with contextlib.suppress(*self._broken):
            # Escaped, so that half of a surrogate pair, which a call can hold, can be sent.
            self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        try:
            text = self._socket.recv(timeout=max(until - time.monotonic(), 0.0))
        except TimeoutError:
            raise LostSession(f"{where}: no whole reply within {self._timeout:g} s") from None
        except self._broken as error:
            raise LostSession(f"{where}: the connection broke ({_named(error)})") from None
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise ServiceFault(f"{where}: the reply is no JSON but {text[:300]!r}") from None
        told = reply.get("data") if isinstance(reply, Mapping) else None
        said = reply.get("type") if isinstance(reply, Mapping) else None
        if said == "error" and isinstance(told, Mapping):
            raise _error(told, where)
        if said != "observation" or not isinstance(told, Mapping):
            raise ServiceFault(
                f"{where}: the reply is {reply!r:.300}; an OpenEnv server sends an observation or "
                "an error there"
            )
        return told

    def _seen(self, data: Mapping[str, Any], kind: str) -> Seen:
        observation, reward = data.get("observation"), data.get("reward")
        done = data.get("done", False)
        rule = f"{self.where}, {kind}: %s is %s; an OpenEnv server sends %s there"
        if not isinstance(observation, Mapping):
            raise ServiceFault(rule % ("`observation`", f"{observation!r:.200}", "an object"))
        if not isinstance(done, bool):
            raise ServiceFault(rule % ("`done`", f"{done!r:.200}", "a truth value"))
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise ServiceFault(rule % ("`reward`", f"{reward!r:.200}", "a number or null"))
        return Seen(observation, None if reward is None else float(reward), done)


def _error(told: Mapping[str, Any], where: str) -> Exception:
    """The exception for an error that the server sent."""
    code, message = told.get("code"), str(told.get("message"))
    if code == _REFUSED:
        return Refused(_details(told) or message)
    if code == _FULL:
        return LostSession(
            f"{where}: the server has no room for a further session ({message[:300]}); start it "
            "with a greater max_concurrent_envs, or set fewer env.workers"
        )
    return ServiceFault(f"{where}: the server says {message!r:.500} ({code})")


def _details(told: Mapping[str, Any]) -> str:
    """Which fields pydantic found at fault, and why."""
    errors = told.get("errors")
    found = [error for error in errors or () if isinstance(error, Mapping)]
    return "; ".join(
        f"{'.'.join(str(part) for part in error.get('loc') or ()) or 'action'}: {error.get('msg')}"
        for error in found
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
