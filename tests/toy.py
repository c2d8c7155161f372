"""A language model without a network: small enough to check, and it minds every earlier token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ToyModel:
    """hidden_p = tanh(sum_{i <= p} decay^(p - i) E[token_i] . W), each segment by itself."""

    vocab_size: int = 32
    width: int = 16
    context_length: int = 4096
    decay: float = 0.9

    def init(self, seed: int = 0):
        keys = jax.random.split(jax.random.key(seed), 3)
        return {
            "embed": jax.random.normal(keys[0], (self.vocab_size, self.width)),
            "mix": jax.random.normal(keys[1], (self.width, self.width)) / 4,
            "head": jax.random.normal(keys[2], (self.vocab_size, self.width)),
        }

    def _hidden(self, params, weights, embedded):
        return jnp.tanh(jnp.einsum("bts,bsd->btd", weights, embedded) @ params["mix"])

    def forward(self, params, tokens, positions, segment_ids):
        gap = positions[:, :, None] - positions[:, None, :]
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        index = jnp.arange(tokens.shape[1])
        seen = same & (index[:, None] >= index[None, :]) & (segment_ids > 0)[:, :, None]
        weights = jnp.where(seen, self.decay ** jnp.maximum(gap, 0), 0)
        return self._hidden(params, weights, params["embed"][tokens])

    def head(self, params):
        return params["head"]

    def init_cache(self, params, slots, length):
        return jnp.zeros((slots + 1, length, self.width))

    recurrent = False

    def extend(self, params, cache, tokens, slots, starts, counts=None):
        where = starts[:, None] + jnp.arange(tokens.shape[1])
        cache = cache.at[slots[:, None], where].set(params["embed"][tokens])
        gap = where[:, :, None] - jnp.arange(cache.shape[1])
        weights = jnp.where(gap >= 0, self.decay ** jnp.maximum(gap, 0), 0)
        return self._hidden(params, weights, cache[slots]), cache

    def read_rows(self, cache, slots, starts, size):
        return cache[slots[:, None], starts[:, None] + jnp.arange(size)]

    def write_rows(self, cache, rows, slots, starts):
        return cache.at[slots[:, None], starts[:, None] + jnp.arange(rows.shape[1])].set(rows)

    def read_states(self, cache, slots):
        return ()

    def write_states(self, cache, states, slots):
        return cache


class RecurrentToy(ToyModel):
    """The same function, with nothing kept of a sequence but one state that moves forward."""

    recurrent = True

    def init_cache(self, params, slots, length):
        return jnp.full((slots + 1, self.width), jnp.nan)

    def extend(self, params, cache, tokens, slots, starts, counts=None):
        size = tokens.shape[1]
        counts = jnp.full(len(slots), size) if counts is None else counts
        index = jnp.arange(size)
        gap = index[:, None] - index
        weights = jnp.where(gap >= 0, self.decay ** jnp.maximum(gap, 0), 0)

        def row(cache, item):
            tokens, slot, start, count = item
            state = jnp.where(start == 0, 0, cache[slot])
            states = weights @ params["embed"][tokens]
            states += self.decay ** (index[:, None] + 1) * state
            last = jnp.where(count > 0, states[count - 1], state)
            return cache.at[slot].set(last), jnp.tanh(states @ params["mix"])

        cache, hidden = jax.lax.scan(row, cache, (tokens, slots, starts, counts))
        return hidden, cache

    def read_rows(self, cache, slots, starts, size):
        return ()

    def write_rows(self, cache, rows, slots, starts):
        return cache

    def read_states(self, cache, slots):
        return cache[slots]

    def write_states(self, cache, states, slots):
        return cache.at[slots].set(states)


def stir(model, seed: int = 1):
    """A network's model with noise on every parameter, norms and biases too, so that each counts.

    Embeddings and convolutions get more of it: the norms after them would amplify rounding.
    """
    rng = np.random.default_rng(seed)

    def moved(path, x):
        large = any(word in jax.tree_util.keystr(path) for word in ("embed", "conv"))
        noise = rng.normal(size=x.shape) * (1.0 if large else 0.2)
        return x + jnp.asarray(noise, x.dtype)

    params = jax.tree_util.tree_map_with_path(moved, model.params)
    return dataclasses.replace(model, params=params)


def random_trajectory(seed: int, turns: int, *, vocab: int = 32, bare: float = 0.2):
    """A token trajectory of random lengths; some turns carry no reasoning."""
    from race_jax.types import TokenTrajectory, TokenTurn

    rng = np.random.default_rng(seed)

    def draw(low, high):
        return tuple(rng.integers(3, vocab, rng.integers(low, high)).tolist())

    return TokenTrajectory(
        f"toy-{seed}",
        draw(5, 40),
        tuple(
            TokenTurn(
                () if rng.random() < bare else (*draw(3, 30), 1, 2),
                (1, 2),
                draw(1, 25),
                draw(0, 30),
            )
            for _ in range(turns)
        ),
    )
