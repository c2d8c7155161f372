"""Dense decoders as pure functions of their parameters, and the `Model` that holds both."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from race_jax.models import parallel
from race_jax.models.blocks import Block
from race_jax.models.config import ModelConfig
from race_jax.models.kernels import check_choices, target_backend
from race_jax.models.layers import rms_norm
from race_jax.models.moe import RouterStats
from race_jax.models.network import abstract_network, param_axes
from race_jax.models.parallel import ROW_STREAM, STREAM
from race_jax.models.rope import rotation_tables
from race_jax.sharding import constrain
from race_jax.types import Cache, Params, States


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder: its configuration, its parameters, and pure functions of parameters and arrays.

    The functions take the parameters explicitly and never read `params`, so that one `Model` serves
    training too. Two models of one configuration are equal and share compiled programs. Arithmetic
    runs in the dtype of the parameters, with norms, rotations, softmax and the residual stream in
    float32.

    Attributes:
        config: The shape of the network.
        params: Nested dict of arrays; the blocks' arrays have a leading axis of layers.
        max_length: Context length in tokens in place of the configuration's, or None.
        attention: How `forward` attends: `auto`, `xla`, `cudnn` or `splash`; see `choose_kernel`
            for what `auto` takes. float32 models always run in plain XLA.
        cached_attention: How `extend` attends, in plain XLA always: `blocked` loops over the rows
            and over the keys that each has, `gathered` works on all keys of all rows at once,
            `auto` takes the first on a CPU and the second elsewhere.
    """

    config: ModelConfig
    params: Params = dataclasses.field(compare=False, repr=False)
    max_length: int | None = None
    attention: str = "auto"
    cached_attention: str = "auto"

    def __post_init__(self):
        check_choices(self.attention, self.cached_attention)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"the context length is {self.max_length}; it must be at least 1.")

    @property
    def vocab_size(self) -> int:
        """Width of the head."""
        return self.config.vocab_size

    @property
    def recurrent(self) -> bool:
        """False: attention can go on from any token that the cache holds."""
        return False

    @property
    def context_length(self) -> int:
        """The most tokens that the model takes in one sequence."""
        return self.max_length or self.config.context_length

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
        """Hidden states after the final norm.

        Args:
            params: Parameters, as in `params`.
            tokens: int32 [B, T], in [0, V); an id outside makes its row NaN. Any id at padding.
            positions: int32 [B, T], from 0 in each segment.
            segment_ids: int32 [B, T]; 0 = padding, on any side. A token sees the earlier tokens of
                its own segment.
            remat: Recompute each block in the backward pass, for less memory.
            ends: int32 [B, T] where rows hold trees, depth first: the token at place j is seen from
                places j to `ends[j] - 1`; j + 1 at padding. `positions` count along a branch.

        Returns:
            float32 [B, T, D]; finite at padding, and without meaning there.
        """
        return self._forward(params, tokens, positions, segment_ids, remat, False, ends)[0]

    def forward_routed(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        remat: bool = False,
    ) -> tuple[jax.Array, RouterStats]:
        """As `forward`, and how a mixture of experts routed the tokens that are not padding.

        Returns:
            Hidden states float32 [B, T, D], and sums for `load_balance`, with their gradients.

        Raises:
            ValueError: If the model has no experts.
        """
        if not self.config.num_experts:
            raise ValueError(
                f"a {self.config.model_type} model has no experts to route to; call forward."
            )
        return self._forward(params, tokens, positions, segment_ids, remat, True, None)

    def _forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        remat: bool,
        routed: bool,
        ends: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states, and the router's statistics if they are asked for."""
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        template = self._template()
        real = segment_ids > 0

        def step(x: jax.Array, layer: Params) -> tuple[jax.Array, RouterStats | None]:
            block = nnx.merge(template, layer)
            q, k, v = block.project(x, cos, sin)
            mixed = parallel.attend(q, k, v, segment_ids, self.attention, ends)
            if routed:
                x, stats = block.finish_routed(x, mixed, real)
            else:
                x, stats = block.finish(x, mixed), None
            return constrain(x, STREAM), stats

        body = jax.checkpoint(step, prevent_cse=False) if remat else step
        params = parallel.hold(params, param_axes, self.config)
        x = parallel.embed(params["embed"], jnp.where(real, tokens, 0), STREAM[:2])
        x, stats = jax.lax.scan(body, x, params["layers"])
        return rms_norm(x, params["norm"], self.config.rms_norm_eps), stats

    def head(self, params: Params) -> jax.Array:
        """The output matrix [V, D]: the embedding when the two are tied."""
        return params["embed"] if self.config.tie_word_embeddings else params["head"]

    def init_cache(self, params: Params, slots: int, length: int) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens, and one spare slot."""
        config = self.config
        return parallel.init_cache(
            config.num_hidden_layers,
            slots,
            length,
            config.num_key_value_heads,
            config.head_dim,
            params["embed"].dtype,
        )

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Append rows of tokens to cached sequences.

        Row r holds the tokens at positions `starts[r]` .. `starts[r] + Q - 1` of slot `slots[r]`,
        and sees all that the slot holds before them. Rows of one call may continue one another in
        the same slot, in any order. Donate the cache to have it updated in place.

        Args:
            params: Parameters, as in `params`.
            cache: From `init_cache`.
            tokens: int32 [R, Q], in [0, V); fill up short rows with any id in that range.
            slots: int32 [R]; the number of slots names the spare one, for empty rows.
            starts: int32 [R]; `starts[r] + Q` must not pass the cache's length, of spare rows
                either: a write past the end would be moved back over earlier tokens.
            counts: int32 [R], tokens of each row that count. Not read: what a short row leaves
                behind lies beyond every later query, or is written over.

        Returns:
            Hidden states float32 [R, Q, D] after the final norm, and the cache.
        """
        del counts
        positions = starts[:, None] + jnp.arange(tokens.shape[1])
        cos, sin = rotation_tables(self.config.rope, self.config.head_dim, positions)
        template = self._template()
        places = self._plan_places(cache, slots, starts, tokens.shape[1])

        def step(carry: Any, item: Any) -> tuple[Any, None]:
            x, cache = carry
            layer, index = item
            block = nnx.merge(template, layer)
            q, k, v = block.project(x, cos, sin)
            mixed, cache = parallel.attend_cached(q, k, v, cache, index, places)
            return (constrain(block.finish(x, mixed), ROW_STREAM), cache), None

        indices = jnp.arange(self.config.num_hidden_layers)
        carry = (parallel.embed(params["embed"], tokens, ROW_STREAM[:2]), cache)
        (x, cache), _ = jax.lax.scan(step, carry, (params["layers"], indices))
        return rms_norm(x, params["norm"], self.config.rms_norm_eps), cache

    def _plan_places(
        self, cache: Cache, slots: jax.Array, starts: jax.Array, size: int
    ) -> parallel.Places:
        """Where rows of `size` new tokens lie, and how they attend on this backend."""
        blocked = self.cached_attention == "blocked" or (
            self.cached_attention == "auto" and target_backend() == "cpu"
        )
        groups = self.config.num_attention_heads // cache.k.shape[2]
        return parallel.plan_places(cache, slots, starts, size * groups if blocked else None)

    def read_rows(self, cache: Cache, slots: jax.Array, starts: jax.Array, size: int) -> Cache:
        """Copy `size` entries from each `(slots[r], starts[r])` out of the cache."""
        return parallel.read_rows(cache, slots, starts, size)

    def write_rows(self, cache: Cache, rows: Cache, slots: jax.Array, starts: jax.Array) -> Cache:
        """Put rows that `read_rows` copied back."""
        return parallel.write_rows(cache, rows, slots, starts)

    def read_states(self, cache: Cache, slots: jax.Array) -> States:
        """Nothing: entries per token are all that a cache holds."""
        return ()

    def write_states(self, cache: Cache, states: States, slots: jax.Array) -> Cache:
        """The cache as it is."""
        return cache

    def _template(self) -> nnx.GraphDef[Block]:
        """The structure of one block, to be filled with one layer's arrays."""
        config = dataclasses.replace(self.config, num_hidden_layers=1)
        graph: Any = nnx.split(abstract_network(config, jnp.dtype("float32")).layers)[0]
        return graph
