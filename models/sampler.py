"""Continuous batching: many conversations in the slots of one cache, continued turn after turn.

A slot holds a conversation from its first request until it is forgotten, so a later turn forwards
only what is new. When all slots are taken and a request waits, the conversation that has been idle
longest is copied to the host, and back when its turn comes. Free slots are filled as soon as a
request waits, whatever the others are at.

A request's tokens must not depend on what else runs. So every program has one shape, or a shape
that the request's own length decides: prompts are cut into chunks from their first new token on,
and all slots decode together whether they are taken or not. Each token's random number comes from
the request's seed and the token's place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from race_jax.logprobs import float32_head
from race_jax.prefixes import common_length
from race_jax.rollout.protocol import Completion, Request
from race_jax.sampling import Rule, draw, uniforms
from race_jax.sharding import constrain
from race_jax.types import Cache, LanguageModel, Params

STOPS = 8
"""Most stop ids of a request."""


@dataclasses.dataclass
class SamplerStats:
    """What a sampler has done.

    Attributes:
        prefilled: Prompt tokens forwarded.
        padded: Tokens forwarded with them to fill chunks.
        shared: Prompt tokens copied from another conversation instead.
        forked: Those of them that a request's `origin` had.
        sampled: Tokens drawn.
        steps: Decoding steps; each could draw one token per slot.
        parked: Times that a conversation was copied to the host.
        dropped: Times that one there was dropped for want of room.
    """

    prefilled: int = 0
    padded: int = 0
    shared: int = 0
    forked: int = 0
    sampled: int = 0
    steps: int = 0
    parked: int = 0
    dropped: int = 0


class Seats(NamedTuple):
    """What all slots are at while they decode.

    Attributes:
        tokens: int32 [S], each slot's last token, which is not in the cache yet.
        positions: int32 [S], its place in the sequence.
        active: bool [S].
        left: int32 [S], how many more tokens may be drawn.
        drawn: int32 [S], how many the request has drawn.
        stops: int32 [S, STOPS], -1 where unused.
        keys: uint32 [S, 2].
        rule: How each slot draws.
    """

    tokens: jax.Array
    positions: jax.Array
    active: jax.Array
    left: jax.Array
    drawn: jax.Array
    stops: jax.Array
    keys: jax.Array
    rule: Rule


def decode(
    model: LanguageModel,
    steps: int,
    known: int,
    params: Params,
    head: jax.Array,
    cache: Cache,
    seats: Seats,
) -> tuple[jax.Array, jax.Array, jax.Array, Cache]:
    """Draw tokens for all active slots, until one of them is finished or `steps` are made.

    Args:
        model: Pure forward functions.
        steps: Most tokens per slot.
        known: Ids from here on are never drawn.
        params: The model's parameters.
        head: float32 [V, D].
        cache: Of the model; donate it.
        seats: At the start.

    Returns:
        Tokens int32 [steps, S] and log-probabilities float32 [steps, S], the number of steps that
        were made, and the cache. A log-probability that is not a number finishes its slot.
    """
    count = len(seats.tokens)
    slots = jnp.where(seats.active, jnp.arange(count), count)

    def going(carry: tuple) -> jax.Array:
        step, finished, *_ = carry
        return (step < steps) & ~finished

    def body(carry: tuple) -> tuple:
        step, _, seats, cache, tokens, logprobs = carry
        starts = jnp.where(seats.active, seats.positions, 0)
        hidden, cache = model.extend(
            params, cache, seats.tokens[:, None], slots, starts, seats.active.astype(jnp.int32)
        )
        logits = jnp.einsum(
            "sd,vd->sv",
            hidden[:, 0].astype(jnp.float32),
            head,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        logits = constrain(logits, ("rows", None))
        new, nats = draw(logits, seats.rule, uniforms(seats.keys, seats.drawn), known)
        new = jnp.where(seats.active, new, 0)
        ended = jnp.any(new[:, None] == seats.stops, axis=1) | (seats.left <= 1) | jnp.isnan(nats)
        seats = seats._replace(
            tokens=new,
            positions=seats.positions + 1,
            left=seats.left - 1,
            drawn=seats.drawn + 1,
        )
        finished = jnp.any(ended & seats.active)
        tokens, logprobs = tokens.at[step].set(new), logprobs.at[step].set(nats)
        return step + 1, finished, seats, cache, tokens, logprobs

    empty = jnp.zeros((steps, count))
    start = (jnp.asarray(0), jnp.asarray(False), seats, cache, empty.astype(jnp.int32), empty)
    made, _, _, cache, tokens, logprobs = jax.lax.while_loop(going, body, start)
    return tokens, logprobs, made, cache


@dataclasses.dataclass
class _Chat:
    """A conversation.

    Attributes:
        name: Of the conversation.
        ids: All tokens so far.
        cached: How many of them the cache holds.
        fixed: How many of these were forwarded in whole chunks from the start.
        slot: Where its cache lies, if it lies there.
        parked: Its cache on the host, otherwise.
        request: What it is at; None while it is idle.
        logprobs: Of the request's tokens so far.
        used: When it was last at work, as a running number.
    """

    name: str
    ids: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    fixed: int = 0
    slot: int | None = None
    parked: tuple[list[Any], Any] | None = None
    request: Request | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    used: int = 0

    @property
    def host_bytes(self) -> int:
        """What its cache takes on the host."""
        return sum(x.nbytes for x in jax.tree.leaves(self.parked))

    @property
    def unread(self) -> int:
        """Tokens to forward before the next can be drawn; the last one goes with the drawing."""
        return len(self.ids) - 1 - self.cached


class LocalSampler:
    """Samples from a network on this process's devices; follows `rollout.protocol.Sampler`.

    To sample on a mesh, call everything within `use_mesh`.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: Params,
        *,
        known: int,
        slots: int = 8,
        length: int | None = None,
        chunk: int = 256,
        rows: int = 1,
        burst: int = 16,
        host_bytes: int = 16 << 30,
        share_prompts: bool = True,
    ):
        """Set up programs for one cache shape.

        Args:
            model: Pure forward functions.
            params: The model's parameters.
            known: Ids from here on are never drawn: the tokenizer's length, in [1, V].
            slots: Conversations in the cache at a time.
            length: Most tokens of a conversation; by default the model's context.
            chunk: Most prompt tokens forwarded at a time, a power of two of at least 16. Smaller
                pieces use a half, a quarter and so on.
            rows: Prompts forwarded at a time. More keep an accelerator busier.
            burst: Most tokens per slot that are drawn before the host looks at them.
            host_bytes: Room on the host for idle conversations that found no slot. Beyond it, the
                one that has been idle longest is dropped, and forwarded again if it goes on.
            share_prompts: Copy the cache of a prompt's beginning from another conversation; not
                with a recurrent model, whose state there is gone.

        Raises:
            ValueError: A size is out of its range.
        """
        length = model.context_length if length is None else length
        for name, value in (("slots", slots), ("rows", rows), ("burst", burst), ("length", length)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if length > model.context_length:
            raise ValueError(
                f"length is {length} tokens, but the model's context is {model.context_length}"
            )
        if not 1 <= known <= model.vocab_size:
            raise ValueError(f"known is {known}: it must be from 1 to {model.vocab_size}")
        if chunk < 16 or chunk & (chunk - 1):
            raise ValueError(f"chunk is {chunk}: it must be a power of two of at least 16")
        self.model, self.length, self.slots, self.chunk = model, length, slots, chunk
        self.rows, self.host_bytes = min(rows, slots), host_bytes
        self.share_prompts = share_prompts and not model.recurrent
        self.stats = SamplerStats()
        self._chats: dict[str, _Chat] = {}
        self._waiting: deque[_Chat] = deque()
        self._settled: list[Completion] = []
        self._clock = itertools.count()
        self._decode = jax.jit(functools.partial(decode, model, burst, known), donate_argnums=(2,))
        self._extend = jax.jit(lambda *args: model.extend(*args)[1], donate_argnums=(1,))
        self._read = jax.jit(functools.partial(model.read_rows, size=chunk))
        self._write = jax.jit(model.write_rows, donate_argnums=(0,))
        self._read_states = jax.jit(model.read_states)
        self._write_states = jax.jit(model.write_states, donate_argnums=(0,))
        self._params, self._head, self._cache = params, float32_head(self.model, params), None

    @property
    def context_length(self) -> int:
        """Most tokens of a conversation."""
        return self.length

    def update(self, params: Params) -> None:
        """Sample from other parameters from now on; all caches are dropped.

        Raises:
            ValueError: A request is still open.
        """
        if open_ := [chat.name for chat in self._chats.values() if chat.request]:
            raise ValueError(
                f"{len(open_)} requests are open, {open_[0]!r} among them: poll or forget them all "
                "before the parameters change"
            )
        self._params, self._head = params, float32_head(self.model, params)
        self._chats.clear()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: The conversation has an open request, or there are too many stop ids.
        """
        chat = self._chats.setdefault(request.conversation, _Chat(request.conversation))
        if chat.request:
            raise ValueError(
                f"conversation {request.conversation!r} has an open request: poll it or forget it "
                "before the next"
            )
        if len(request.stop) > STOPS:
            raise ValueError(f"a request has {len(request.stop)} stop ids: at most {STOPS}")
        wrong = [i for i in request.prompt if not 0 <= i < self.model.vocab_size]
        if wrong:
            error = (
                f"the prompt holds id {wrong[0]}, but the model's ids are 0 to "
                f"{self.model.vocab_size - 1}"
            )
            self._settled.append(Completion(chat.name, (), (), "error", error))
            return
        if len(request.prompt) >= self.length:
            self._settled.append(Completion(chat.name, (), (), "length"))
            return
        chat.request, chat.logprobs = request, []
        self._waiting.append(chat)

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """Work until something is finished, `timeout` seconds have passed, or nothing is queued."""
        end = None if timeout is None else time.monotonic() + timeout
        finished, self._settled = self._settled, []
        while not finished:
            self._seat()
            running = [c for c in self._chats.values() if c.request and c.slot is not None]
            if not running:
                break
            if any(chat.unread for chat in running):
                self._prefill([chat for chat in running if chat.unread])
            else:
                finished = self._draw(running)
            if end is not None and time.monotonic() >= end:
                break
        return finished

    def forget(self, conversation: str) -> None:
        """Drop a conversation's cache, and its request if one is still queued or running."""
        chat = self._chats.pop(conversation, None)
        if chat in self._waiting:
            self._waiting.remove(chat)
        self._settled = [c for c in self._settled if c.conversation != conversation]

    def close(self) -> None:
        """Free the cache."""
        self._chats.clear()
        self._waiting.clear()
        self._settled.clear()
        self._cache = None

    def _seat(self) -> None:
        """Give slots to waiting requests, in their order; those that find none go on waiting."""
        if self._cache is None and self._waiting:
            # The last chunk of a prompt may reach chunk - 1 beyond the conversation's end.
            self._cache = self.model.init_cache(self._params, self.slots, self.length + self.chunk)
        for chat in list(self._waiting):
            if chat.slot is None and not self._take_slot(chat):
                continue
            self._waiting.remove(chat)
            assert chat.request is not None
            prompt = chat.request.prompt
            if chat.cached == 0 and chat.request.origin in self._chats:
                self._fork(chat, self._chats[chat.request.origin], prompt)
            same = common_length(chat.ids[: chat.cached], prompt)
            # Entries can be cut off anywhere; a recurrent state stands where it stands.
            whole = same == chat.cached < len(prompt)
            chat.cached = min(same, len(prompt) - 1) if whole or not self.model.recurrent else 0
            chat.fixed = min(chat.fixed, chat.cached // self.chunk * self.chunk)
            chat.ids = list(prompt)
            chat.used = next(self._clock)

    def _fork(self, chat: _Chat, origin: _Chat, prompt: tuple[int, ...]) -> None:
        """Copy what `origin` has of a prompt, its sampled tokens too, from its slot or the host.

        A recurrent model's state there is gone, so it forwards the prompt again.
        """
        same = min(common_length(origin.ids[: origin.cached], prompt), len(prompt) - 1)
        if self.model.recurrent or same == 0:
            return
        slot = np.asarray([chat.slot])
        for n, at in enumerate(range(0, same, self.chunk)):
            start = np.asarray([at])
            if origin.parked is not None:
                rows = origin.parked[0][n]
            else:
                rows = self._read(self._cache, np.asarray([origin.slot]), start)
            self._cache = self._write(self._cache, rows, slot, start)
        chat.ids, chat.cached = list(prompt[:same]), same
        chat.fixed = min(origin.fixed, same // self.chunk * self.chunk)
        origin.used = next(self._clock)
        self.stats.shared += same
        self.stats.forked += same

    def _take_slot(self, chat: _Chat) -> bool:
        """Find a slot for a conversation, and restore its cache there."""
        taken = {c.slot: c for c in self._chats.values() if c.slot is not None}
        free = [slot for slot in range(self.slots) if slot not in taken]
        if not free:
            idle = [c for c in taken.values() if c.request is None]
            if not idle:
                return False
            oldest = min(idle, key=lambda c: c.used)
            assert oldest.slot is not None
            free = [oldest.slot]
            self._park(oldest)
        chat.slot = free[0]
        if chat.parked is not None:
            slot = np.asarray([chat.slot])
            rows, states = chat.parked
            for n, part in enumerate(rows):
                self._cache = self._write(self._cache, part, slot, np.asarray([n * self.chunk]))
            self._cache = self._write_states(self._cache, states, slot)
            chat.parked = None
        return True

    def _park(self, chat: _Chat) -> None:
        """Copy an idle conversation's cache to the host and free its slot."""
        slot = np.asarray([chat.slot])
        starts = range(0, chat.cached, self.chunk)
        rows = [jax.device_get(self._read(self._cache, slot, np.asarray([at]))) for at in starts]
        chat.parked = rows, jax.device_get(self._read_states(self._cache, slot))
        chat.slot = None
        self.stats.parked += 1
        held = sorted((c for c in self._chats.values() if c.parked), key=lambda c: c.used)
        total = sum(c.host_bytes for c in held)
        for other in held:
            # What waits for a slot is about to need its own.
            if total > self.host_bytes and other.request is None:
                total -= other.host_bytes
                other.parked, other.cached, other.fixed = None, 0, 0
                self.stats.dropped += 1

    def _wipe(self, chat: _Chat) -> None:
        """Clear a slot: what is not a number would reach its next conversation, masked or not."""
        slot = np.asarray([chat.slot])
        for at in range(0, len(chat.ids), self.chunk):
            start = np.asarray([at])
            rows = self._read(self._cache, slot, start)
            self._cache = self._write(self._cache, jax.tree.map(np.zeros_like, rows), slot, start)
        chat.ids, chat.cached, chat.fixed = [], 0, 0

    def _prefill(self, chats: list[_Chat]) -> None:
        """Forward one chunk of up to `rows` prompts, in the order in which they were seated."""
        chats = sorted(chats, key=lambda chat: chat.used)
        chosen: list[_Chat] = []
        for chat in chats:
            if chat.cached == 0 and self.share_prompts:
                if self._should_wait(chat, chats):
                    continue
                self._share(chat)
            if chat.unread and (not chosen or self._bucket(chat) == self._bucket(chosen[0])):
                chosen.append(chat)
            if len(chosen) == self.rows:
                break
        if not chosen:
            return
        size = self._bucket(chosen[0])
        tokens = np.zeros((self.rows, size), np.int32)
        slots = np.full(self.rows, self.slots, np.int32)
        starts, counts = np.zeros(self.rows, np.int32), np.zeros(self.rows, np.int32)
        for r, chat in enumerate(chosen):
            new = chat.ids[chat.cached : chat.cached + min(size, chat.unread)]
            tokens[r, : len(new)] = new
            assert chat.slot is not None
            slots[r], starts[r], counts[r] = chat.slot, chat.cached, len(new)
            if len(new) == self.chunk and chat.fixed == chat.cached:
                chat.fixed += self.chunk
            chat.cached += len(new)
        self._cache = self._extend(self._params, self._cache, tokens, slots, starts, counts)
        self.stats.prefilled += int(counts.sum())
        self.stats.padded += tokens.size - int(counts.sum())

    def _bucket(self, chat: _Chat) -> int:
        """How long a conversation's next chunk is."""
        return min(max(16, 1 << (chat.unread - 1).bit_length()), self.chunk)

    def _should_wait(self, chat: _Chat, chats: Sequence[_Chat]) -> bool:
        """Whether a prompt that is being forwarded will soon hold more of this one's beginning."""
        earlier = [other for other in chats if other.unread and other.used < chat.used]
        useful = {c.name: common_length(c.ids, chat.ids) // self.chunk for c in earlier}
        return any(useful[c.name] * self.chunk > c.fixed for c in earlier)

    def _share(self, chat: _Chat) -> None:
        """Copy the chunks with which another conversation's prompt begins alike.

        Only whole chunks that were forwarded as this prompt's own would be: so a request's tokens
        do not depend on whether there was something to copy.
        """
        others = [c for c in self._chats.values() if c is not chat and c.slot is not None]
        lengths = {c.name: common_length(c.ids[: c.fixed], chat.ids) for c in others}
        donor = max(others, key=lambda c: lengths[c.name], default=None)
        if donor is None:
            return
        same = min(lengths[donor.name], chat.unread) // self.chunk * self.chunk
        for at in range(0, same, self.chunk):
            start = np.asarray([at])
            rows = self._read(self._cache, np.asarray([donor.slot]), start)
            self._cache = self._write(self._cache, rows, np.asarray([chat.slot]), start)
        chat.cached = chat.fixed = same
        self.stats.shared += same

    def _draw(self, chats: list[_Chat]) -> list[Completion]:
        """Decode one burst and hand out what is finished."""
        seats = self._seats(chats)
        out = self._decode(self._params, self._head, self._cache, seats)
        self._cache = out[3]
        tokens, logprobs, made = jax.device_get(out[:3])
        self.stats.steps += int(made)
        finished = []
        for chat in chats:
            new, nats = tokens[:made, chat.slot].tolist(), logprobs[:made, chat.slot].tolist()
            chat.ids += new
            chat.cached += int(made)
            chat.logprobs += nats
            self.stats.sampled += len(new)
            completion = self._completion(chat)
            if completion is not None:
                chat.request, chat.used = None, next(self._clock)
                finished.append(completion)
        return finished

    def _completion(self, chat: _Chat) -> Completion | None:
        """What a conversation's request has come to, if it is finished."""
        request, count = chat.request, len(chat.logprobs)
        assert request is not None
        ids, nats = tuple(chat.ids[-count:]), tuple(chat.logprobs)
        if np.isnan(nats[-1]):
            error = "the model's logits are not numbers"
            self._wipe(chat)
            return Completion(chat.name, ids[:-1], nats[:-1], "error", error)
        if ids[-1] in request.stop:
            return Completion(chat.name, ids, nats, "stop")
        if count >= request.max_tokens or len(chat.ids) >= self.length:
            return Completion(chat.name, ids, nats, "length")
        return None

    def _seats(self, chats: list[_Chat]) -> Seats:
        """The arrays of one burst."""
        count = self.slots
        flat = {
            name: np.zeros(count, np.int32) for name in ("tokens", "positions", "left", "drawn")
        }
        active, stops = np.zeros(count, bool), np.full((count, STOPS), -1, np.int32)
        keys = np.zeros((count, 2), np.uint32)
        rules = np.tile(np.asarray([1, 1, 0], np.float32)[:, None], count)
        for chat in chats:
            request, slot, drawn = chat.request, chat.slot, len(chat.logprobs)
            assert request is not None
            active[slot] = True
            flat["tokens"][slot], flat["positions"][slot] = chat.ids[-1], chat.cached
            flat["drawn"][slot] = drawn
            flat["left"][slot] = min(request.max_tokens - drawn, self.length - len(chat.ids))
            stops[slot, : len(request.stop)] = request.stop
            seed = request.seed % (1 << 64)
            keys[slot] = seed >> 32, seed & 0xFFFFFFFF
            how = request.sampling
            rules[:, slot] = how.temperature, how.top_p, how.top_k
        heat, top_p, top_k = (jnp.asarray(row) for row in rules)
        return Seats(
            **{name: jnp.asarray(x) for name, x in flat.items()},
            active=jnp.asarray(active),
            stops=jnp.asarray(stops),
            keys=jnp.asarray(keys),
            rule=Rule(heat, top_p, top_k.astype(jnp.int32)),
        )
