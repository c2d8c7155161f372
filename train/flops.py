"""FLOPs that a model's mathematics needs, each product once: the measure of compiled programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from race_jax.models import ModelConfig, abstract_params, param_axes


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Counts for one model: two per multiplication and addition, of products alone.

    A token passes every matrix of the blocks once, of experts those that it is routed to. Attention
    is counted for the pairs of tokens that see each other and no more. The backward pass of a
    product is two products, so a training step needs three times this.

    Attributes:
        config: The shape of the network.
    """

    config: ModelConfig

    def forward(self, rows: int, tokens: int, places: int) -> float:
        """Rows of one sequence each, and the head on `places` of each.

        Args:
            rows: B.
            tokens: T.
            places: Places per row whose log-probabilities are wanted.
        """
        pairs = tokens * (tokens + 1) / 2
        each = tokens * self.token + pairs * self.pair + places * self.place
        return rows * each

    def extend(self, rows: int, tokens: int, before: int, places: int) -> float:
        """`tokens` more of `rows` sequences that have `before` already; `places` in all."""
        pairs = tokens * before + tokens * (tokens + 1) / 2
        return rows * (tokens * self.token + pairs * self.pair) + places * self.place

    @property
    def token(self) -> float:
        """Of one token in all blocks, without what it sees of other tokens."""
        shapes, axes = abstract_params(self.config), param_axes(self.config)
        sizes = jax.tree.map(self._entries, shapes, axes)
        config = self.config
        # Step by step, gated DeltaNet reads its state twice and writes it once.
        state = config.linear_key_head_dim * config.linear_value_head_dim
        states = self._linear_layers * config.linear_num_value_heads * state
        return 2.0 * sum(jax.tree.leaves(sizes)) + 6.0 * states

    @property
    def _linear_layers(self) -> int:
        """Blocks with gated DeltaNet in place of attention."""
        return self.config.layer_types.count("linear_attention")

    @property
    def pair(self) -> float:
        """Of one token that sees one other, in all layers: a score and a weighted value."""
        config = self.config
        layers = config.num_hidden_layers - self._linear_layers
        return 4.0 * layers * config.num_attention_heads * config.head_dim

    @property
    def place(self) -> float:
        """Of the head at one place."""
        return 2.0 * self.config.vocab_size * self.config.hidden_size

    def _entries(self, leaf: Any, axes: tuple[str, ...]) -> float:
        """Entries of a parameter that one token meets in a product."""
        core = [axis for axis in axes if axis != "layers"]
        matrix = "embed" in core and len(core) > 1 and "vocab" not in core
        if not matrix and "conv" not in core:
            return 0
        size = math.prod(leaf.shape)
        if "experts" not in core or len(core) == 2:  # what has experts and no more is the router
            return size
        return size * self.config.num_experts_per_tok / self.config.num_experts
