"""Hybrids of gated DeltaNet and attention as pure functions of their parameters."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models import parallel
from race_jax.models.cache import KVCache
from race_jax.models.config import LAYER_TYPES, ModelConfig
from race_jax.models.decoder import Model
from race_jax.models.delta_parallel import mix_rows
from race_jax.models.deltanet import find_fresh
from race_jax.models.hybrid_blocks import (
    DeltaNet,
    GatedAttention,
    centred_norm,
    make_delta,
)
from race_jax.models.network import abstract_network, check_dtype, new_network, param_axes
from race_jax.models.parallel import ROW_STREAM, STREAM, store_slots
from race_jax.models.products import exact
from race_jax.models.recurrent import HybridCache, HybridStates, Rows, convolve_rows, pass_rows
from race_jax.models.rope import rotation_tables
from race_jax.sharding import ambient_mesh, constrain
from race_jax.types import Params

LINEAR, FULL = LAYER_TYPES
_STATE_AXES = ("layers", "slots", "linear_heads", "head_dim", None)
_WINDOW_AXES = ("layers", "slots", None, "linear_heads", "head_dim")


class HybridModel(Model):
    """A hybrid, with the functions that `Model` has; see there for the attributes.

    The blocks form a pattern that repeats, such as three with gated DeltaNet and one with
    attention; the functions scan over the repetitions.

    A slot of the cache holds states that only move forward, beside keys and values: it can be
    continued from where it stands, from the start, or from states that `read_states` copied.
    """

    @property
    def recurrent(self) -> bool:
        """True, unless all blocks have attention."""
        return LINEAR in self.config.layer_types

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        remat: bool = False,
        ends: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states after the final norm, with gated DeltaNet in chunks.

        As `Model.forward`; the tokens of a segment must lie side by side, and `ends` are refused.
        """
        if ends is not None:
            raise ValueError(
                f"a {self.config.model_type} model reads rows in order, so they cannot hold trees; "
                "lay each path out on its own (share: false)."
            )
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        real, fresh = segment_ids > 0, find_fresh(segment_ids)
        precision = exact(params["embed"].dtype)

        def mix_full(net: GatedAttention, x: jax.Array, carry: Any, index: Any) -> tuple:
            q, k, v, gate = net.project(x, cos, sin)
            mixed = parallel.attend(q, k, v, segment_ids, self.attention)
            return net.output(mixed, gate), carry

        def mix_linear(net: DeltaNet, x: jax.Array, carry: Any, index: Any) -> tuple:
            projected = net.project(x, real)
            read = mix_rows(projected, net.kernels, fresh, precision)
            return net.output(read, projected.gate), carry

        mixers = {FULL: mix_full, LINEAR: mix_linear}

        def step(x: jax.Array, layers: Params) -> tuple[jax.Array, None]:
            return self._blocks(layers, x, (), mixers, STREAM, remat=remat)[0], None

        params = parallel.hold(params, param_axes, self.config)
        x = parallel.embed(params["embed"], jnp.where(real, tokens, 0), STREAM[:2])
        x, _ = jax.lax.scan(step, x, self._repetitions(params))
        return centred_norm(x, params["norm"], self.config.rms_norm_eps)

    def init_cache(self, params: Params, slots: int, length: int) -> HybridCache:
        """An empty cache for `slots` sequences of at most `length` tokens, and one spare slot."""
        config, dtype = self.config, params["embed"].dtype
        entries = parallel.init_cache(
            len(config.layers_of(FULL)),
            slots,
            length,
            config.num_key_value_heads,
            config.head_dim,
            dtype,
        )
        lead = (len(config.layers_of(LINEAR)), entries.k.shape[1])
        keys = (config.linear_num_key_heads, config.linear_key_head_dim)
        values = (config.linear_num_value_heads, config.linear_value_head_dim)
        past = config.linear_conv_kernel_dim - 1

        def make() -> HybridStates:
            state = jnp.zeros((*lead, values[0], keys[1], values[1]), jnp.float32)
            q, k, v = (jnp.zeros((*lead, past, *x), dtype) for x in (keys, keys, values))
            q, k, v = (constrain(x, _WINDOW_AXES) for x in (q, k, v))
            return HybridStates(constrain(state, _STATE_AXES), (q, k, v))

        return HybridCache(entries, make() if ambient_mesh() is None else jax.jit(make)())

    def extend(
        self,
        params: Params,
        cache: HybridCache,
        tokens: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, HybridCache]:
        """Append rows of tokens to cached sequences, as `Model.extend` does.

        A slot's states must stand at `starts[r]`; a row that starts at 0 finds empty ones, whatever
        the slot held. Rows of one call that share a slot are neighbours, each begins where the one
        before ends, and only the last may have fewer tokens that count than Q; what follows these
        leaves no trace in the states. With Q = 1 gated DeltaNet runs in its recurrent form, all
        slots at once, else in chunks, row by row.
        """
        size = tokens.shape[1]
        counts = jnp.full_like(starts, size) if counts is None else jnp.clip(counts, 0, size)
        positions = starts[:, None] + jnp.arange(size)
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        places = self._plan_places(cache.entries, slots, starts, size)
        rows = Rows(_at(cache, slots), starts, counts)
        precision = exact(params["embed"].dtype)

        def mix_full(net: GatedAttention, x: jax.Array, cache: HybridCache, index: Any) -> tuple:
            q, k, v, gate = net.project(x, cos, sin)
            mixed, entries = parallel.attend_cached(q, k, v, cache.entries, index, places)
            return net.output(mixed, gate), cache._replace(entries=entries)

        def mix_linear(net: DeltaNet, x: jax.Array, cache: HybridCache, index: Any) -> tuple:
            projected = net.project(x, jnp.ones(x.shape[:2], bool))
            parts = zip(projected.inputs, net.kernels, cache.states.windows, strict=True)
            done = [convolve_rows(*part, index, rows) for part in parts]
            (q, q_window), (k, k_window), (v, v_window) = done
            delta = make_delta(projected, (q, k, v), jnp.zeros(x.shape[:2], bool))
            read, state = pass_rows(delta, cache.states.state, index, rows, precision)
            states = HybridStates(state, (q_window, k_window, v_window))
            return net.output(read, projected.gate), cache._replace(states=states)

        mixers = {FULL: mix_full, LINEAR: mix_linear}

        def step(carry: Any, item: Any) -> tuple[Any, None]:
            layers, index = item
            x, cache = carry
            return self._blocks(layers, x, cache, mixers, ROW_STREAM, index), None

        repetitions = jnp.arange(self.config.num_hidden_layers // self.config.period)
        carry = (parallel.embed(params["embed"], tokens, ROW_STREAM[:2]), cache)
        (x, cache), _ = jax.lax.scan(step, carry, (self._repetitions(params), repetitions))
        return centred_norm(x, params["norm"], self.config.rms_norm_eps), cache

    def read_rows(
        self, cache: HybridCache, slots: jax.Array, starts: jax.Array, size: int
    ) -> KVCache:
        """Copy `size` entries of keys and values from each `(slots[r], starts[r])`."""
        return parallel.read_rows(cache.entries, slots, starts, size)

    def write_rows(
        self, cache: HybridCache, rows: KVCache, slots: jax.Array, starts: jax.Array
    ) -> HybridCache:
        """Put rows that `read_rows` copied back."""
        return cache._replace(entries=parallel.write_rows(cache.entries, rows, slots, starts))

    def read_states(self, cache: HybridCache, slots: jax.Array) -> HybridStates:
        """Copy the recurrent states and convolution windows of `slots` int32 [R] as they stand."""
        at = _at(cache, slots)
        return jax.tree.map(lambda x: x[:, at], cache.states)

    def write_states(
        self, cache: HybridCache, states: HybridStates, slots: jax.Array
    ) -> HybridCache:
        """Put states that `read_states` copied into `slots`."""
        at = _at(cache, slots)
        return cache._replace(
            states=jax.tree.map(lambda x, y: x.at[:, at].set(y), cache.states, states)
        )

    def _blocks(
        self,
        layers: Params,
        x: jax.Array,
        carry: Any,
        mixers: dict[str, Callable[..., tuple]],
        axes: tuple[str | None, ...],
        repetition: Any = 0,
        *,
        remat: bool = False,
    ) -> tuple[jax.Array, Any]:
        """One repetition of the pattern: the residual stream and what the mixers carry, after it.

        `mixers` has for each kind a function of the module, the normed input, what is carried, and
        the number of the block among those of its kind. With `remat` each block's input is kept and
        the rest recomputed; a whole repetition at a time would hold all of its blocks at once.
        """
        eps, types = self.config.rms_norm_eps, self.config.layer_types[: self.config.period]
        seen: Counter[str] = Counter()
        for place, (kind, name, template, mlp) in enumerate(self._templates(types)):
            number = seen[kind]
            seen[kind] += 1
            mix = functools.partial(mixers[kind], index=repetition * types.count(kind) + number)
            mixer, rest = (template, name, number), (mlp, "mlp", place)

            def block(x: jax.Array, carry: Any, mix=mix, mixer=mixer, rest=rest, place=place):
                # Slices are taken in here: taken before, they would be kept for the backward pass.
                normed = centred_norm(x, layers["attention_norm"][place], eps)
                out, carry = mix(_module(layers, *mixer), normed, carry)
                x = x + out
                normed = centred_norm(x, layers["mlp_norm"][place], eps)
                return constrain(x + _module(layers, *rest)(normed), axes), carry

            x, carry = (jax.checkpoint(block, prevent_cse=False) if remat else block)(x, carry)
        return x, carry

    def _templates(self, types: tuple[str, ...]) -> Iterator[tuple[str, str, Any, Any]]:
        """For each block its kind, the name of its mixer, and the structures of both its parts."""
        layers = abstract_network(self.config, jnp.dtype("float32")).layers
        names = {FULL: "attention", LINEAR: "deltanet"}
        mixers = {kind: getattr(layers, name) for kind, name in names.items()}
        structures = {kind: nnx.split(module)[0] for kind, module in mixers.items()}
        mlp = nnx.split(layers.mlp)[0]
        return ((kind, names[kind], structures[kind], mlp) for kind in types)

    def _repetitions(self, params: Params) -> Params:
        """The blocks' parameters with an axis of repetitions before that of blocks of one kind."""
        count = self.config.num_hidden_layers // self.config.period
        return jax.tree.map(
            lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), params["layers"]
        )


def make_model(
    config: ModelConfig,
    params: Params,
    max_length: int | None = None,
    attention: str = "auto",
) -> Model:
    """The `Model` or `HybridModel` that a configuration calls for; arguments as theirs."""
    kind = HybridModel if config.family.hybrid else Model
    return kind(config, params, max_length, attention)


def init_model(config: ModelConfig, seed: int, dtype: str = "float32") -> Model:
    """A model with fresh parameters.

    Args:
        config: The shape of the network.
        seed: Any integer; the same seed gives the same parameters.
        dtype: `float32` or `bfloat16`.

    Returns:
        Matrices drawn from N(0, initializer_range^2), norms that scale by 1, biases at 0; decays of
        gated DeltaNet as transformers draws them.
    """
    network = new_network(config, seed, check_dtype(dtype))
    return make_model(config, nnx.to_pure_dict(nnx.split(network)[1]))


def _module(layers: Params, structure: Any, name: str, number: int) -> Any:
    """The `number`-th of the modules that are stacked under `name`."""
    return nnx.merge(structure, jax.tree.map(lambda a: a[number], layers[name]))


def _at(cache: HybridCache, slots: jax.Array) -> jax.Array:
    """Where slots lie in the stores of states."""
    return store_slots(slots, cache.states.state.shape[1])
