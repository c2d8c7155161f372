"""Hybrids of gated DeltaNet and attention as pure functions of their parameters."""

from __future__ import annotations

import functools
import math
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
from race_jax.models.recurrent import HybridCache, HybridStates, Rows, convolve_rows, pass_rows
from race_jax.models.rope import rotation_tables
from race_jax.sharding import ambient_mesh, constrain
from race_jax.types import Params

LINEAR, FULL = LAYER_TYPES
_WHOLE = ("batch", "time", "features")  # the residual stream in `forward`
_ROWS = ("rows", None, "features")  # and in `extend`
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
    ) -> jax.Array:
        """Hidden states after the final norm, with gated DeltaNet in chunks.

        As `Model.forward`; the tokens of a segment must lie side by side.
        """
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        real, fresh = segment_ids > 0, find_fresh(segment_ids)
        precision = _precision(params)

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
            return self._blocks(layers, x, (), mixers, _WHOLE, remat=remat)[0], None

        params = parallel.hold(params, param_axes, self.config)
        x = parallel.embed(params["embed"], jnp.where(real, tokens, 0), _WHOLE[:2])
        x, _ = jax.lax.scan(step, x, self._repetitions(params))
        return centred_norm(x, params["norm"], self.config.rms_norm_eps)

    def forward_routed(self, *args: Any, **kwargs: Any) -> Any:
        """A ValueError: there are no experts."""
        raise ValueError(
            f"a {self.config.model_type} model has no experts to route to; call forward."
        )

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

        def make() -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
            state = jnp.zeros((*lead, values[0], keys[1], values[1]), jnp.float32)
            q, k, v = (jnp.zeros((*lead, past, *x), dtype) for x in (keys, keys, values))
            q, k, v = (constrain(x, _WINDOW_AXES) for x in (q, k, v))
            return constrain(state, _STATE_AXES), (q, k, v)

        state, windows = make() if ambient_mesh() is None else jax.jit(make)()
        return HybridCache(entries.k, entries.v, state, windows)

    def extend(
        self,
        params: Params,
        cache: HybridCache,
        tokens: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, HybridCache]:
        """Append rows of tokens to cached sequences.

        Row r holds the tokens at positions `starts[r]` .. `starts[r] + Q - 1` of slot `slots[r]`,
        where the slot's states must stand at `starts[r]`; a row that starts at 0 finds empty ones,
        whatever the slot held. Rows of one call that share a slot are neighbours, each begins where
        the one before ends, and only the last may be short. Donate the cache to have it updated in
        place. With Q = 1 gated DeltaNet runs in its recurrent form, all slots at once, else in
        chunks, row by row.

        Args:
            params: Parameters, as in `params`.
            cache: From `init_cache`.
            tokens: int32 [R, Q], in [0, V); fill up short rows with any id in that range.
            slots: int32 [R]; the number of slots names the spare one, for empty rows.
            starts: int32 [R]; `starts[r] + Q` must not pass the cache's length, of spare rows
                either: a write past the end would be moved back over earlier tokens.
            counts: int32 [R], tokens of each row that count, all by default. The others leave no
                trace in the states.

        Returns:
            Hidden states float32 [R, Q, D] after the final norm, and the cache.
        """
        size = tokens.shape[1]
        counts = jnp.full_like(starts, size) if counts is None else jnp.clip(counts, 0, size)
        positions = starts[:, None] + jnp.arange(size)
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        places = self._plan_places(KVCache(cache.k, cache.v), slots, starts, size)
        rows = Rows(_store_slots(cache, slots), starts, counts)
        precision = _precision(params)

        def mix_full(net: GatedAttention, x: jax.Array, cache: HybridCache, index: Any) -> tuple:
            q, k, v, gate = net.project(x, cos, sin)
            entries = KVCache(cache.k, cache.v)
            mixed, entries = parallel.attend_cached(q, k, v, entries, index, places)
            return net.output(mixed, gate), cache._replace(k=entries.k, v=entries.v)

        def mix_linear(net: DeltaNet, x: jax.Array, cache: HybridCache, index: Any) -> tuple:
            projected = net.project(x, jnp.ones(x.shape[:2], bool))
            parts = zip(projected.inputs, net.kernels, cache.windows, strict=True)
            done = [convolve_rows(*part, index, rows) for part in parts]
            (q, q_window), (k, k_window), (v, v_window) = done
            delta = make_delta(projected, (q, k, v), jnp.zeros(x.shape[:2], bool))
            read, state = pass_rows(delta, cache.state, index, rows, precision)
            cache = cache._replace(state=state, windows=(q_window, k_window, v_window))
            return net.output(read, projected.gate), cache

        mixers = {FULL: mix_full, LINEAR: mix_linear}

        def step(carry: Any, item: Any) -> tuple[Any, None]:
            layers, index = item
            x, cache = carry
            return self._blocks(layers, x, cache, mixers, _ROWS, index), None

        repetitions = jnp.arange(self.config.num_hidden_layers // self.config.period)
        carry = (parallel.embed(params["embed"], tokens, _ROWS[:2]), cache)
        (x, cache), _ = jax.lax.scan(step, carry, (self._repetitions(params), repetitions))
        return centred_norm(x, params["norm"], self.config.rms_norm_eps), cache

    def read_rows(self, cache: Any, slots: jax.Array, starts: jax.Array, size: int) -> KVCache:
        """Copy `size` entries of keys and values from each `(slots[r], starts[r])`."""
        return parallel.read_rows(KVCache(cache.k, cache.v), slots, starts, size)

    def write_rows(self, cache: Any, rows: KVCache, slots: jax.Array, starts: jax.Array) -> Any:
        """Put rows that `read_rows` copied back."""
        entries = parallel.write_rows(KVCache(cache.k, cache.v), rows, slots, starts)
        return cache._replace(k=entries.k, v=entries.v)

    def read_states(self, cache: Any, slots: jax.Array) -> Any:
        """Copy the recurrent states and convolution windows of `slots` int32 [R] as they stand."""
        at = _store_slots(cache, slots)
        q, k, v = (x[:, at] for x in cache.windows)
        return HybridStates(cache.state[:, at], (q, k, v))

    def write_states(self, cache: Any, states: Any, slots: jax.Array) -> Any:
        """Put states that `read_states` copied into `slots`."""
        at = _store_slots(cache, slots)
        pairs = zip(cache.windows, states.windows, strict=True)
        q, k, v = (x.at[:, at].set(y) for x, y in pairs)
        return cache._replace(state=cache.state.at[:, at].set(states.state), windows=(q, k, v))

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


def _precision(params: Params) -> jax.lax.Precision | None:
    """True float32 for float32 parameters, the backend's fastest for others."""
    return jax.lax.Precision.HIGHEST if params["embed"].dtype == jnp.float32 else None


def _module(layers: Params, structure: Any, name: str, number: int) -> Any:
    """The `number`-th of the modules that are stacked under `name`."""
    return nnx.merge(structure, jax.tree.map(lambda a: a[number], layers[name]))


def _store_slots(cache: HybridCache, slots: jax.Array) -> jax.Array:
    """Where slots lie in a cache, which on a mesh has a spare slot at the end of each piece."""
    slots, mesh = jnp.asarray(slots), ambient_mesh()
    if mesh is None:
        return slots
    pieces = math.prod(mesh.shape[axis] for axis in ("data", "fsdp"))
    total = cache.k.shape[1]
    each = total // pieces - 1
    at = slots // each * (each + 1) + slots % each
    return jnp.where(slots < pieces * each, at, total - 1)
