"""Rotary position embeddings: frequencies, position tables, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
}
"""The settings that each kind of rotary embedding reads, beside its name and base."""
_MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Settings that matter for the positions of images alone."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rotary position embedding. The names are those of `rope_parameters` in `config.json`.

    Attributes:
        rope_type: `default`, `linear` or `yarn`.
        rope_theta: Base of the frequencies.
        factor: How far the context is stretched; at least 1.
        original_max_position_embeddings: Context length before stretching, in tokens (yarn).
        attention_factor: Multiplies cosines and sines; None to derive it from `factor` (yarn).
        mscale: With `mscale_all_dim`, another way to derive the attention factor (yarn).
        mscale_all_dim: See `mscale`.
        beta_fast: Dimensions that turn more often than this in the original context keep their
            frequency (yarn).
        beta_slow: Dimensions that turn less often than this are divided by `factor` (yarn).
        truncate: Whether the bounds of the blend are rounded to whole dimensions (yarn).
        partial_rotary_factor: Share of each head that is rotated, its first entries.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0

    def __post_init__(self):
        if self.rope_type not in _KEYS:
            raise ValueError(
                f"rope_type is {self.rope_type!r}; the supported ones are {', '.join(_KEYS)}. "
                "Choose a model with one of them."
            )
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta is {self.rope_theta!r}; it must be above 1.")
        if not self.factor >= 1:
            raise ValueError(f"the rotary factor is {self.factor!r}; it must be at least 1.")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor!r}; it must be above 0 and "
                "at most 1."
            )
        if self.rope_type == "yarn" and not self.original_max_position_embeddings:
            raise ValueError(
                "a yarn rotary embedding needs original_max_position_embeddings, the context "
                "length before stretching."
            )

    @property
    def stretched_context(self) -> int:
        """The context length that YaRN reaches, in tokens; 0 for the other kinds."""
        return int(self.factor * (self.original_max_position_embeddings or 0))

    def rotary_width(self, head_dim: int) -> int:
        """How many entries of a head of that width are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(
        cls, data: Mapping[str, Any], max_positions: int, partial: float | None = None
    ) -> RopeConfig:
        """Read either spelling of `config.json`.

        Args:
            data: The parsed file: `rope_theta` with `rope_scaling` (transformers 4), or
                `rope_parameters` (transformers 5). `rope_scaling` wins, as in transformers.
            max_positions: `max_position_embeddings` of the file.
            partial: The share of a head that is rotated where the file names none; None for a model
                that rotates whole heads.

        Returns:
            The settings, with every default filled in.

        Raises:
            ValueError: If the kind is not supported, or a setting is there that it does not read.
        """
        source = data.get("rope_scaling") or data.get("rope_parameters") or {}
        values = {k: v for k, v in source.items() if v is not None}
        legacy_type = values.pop("type", "default")
        kind = values.pop("rope_type", legacy_type)
        theta = values.pop("rope_theta", None) or data.get("rope_theta") or 10000.0
        share = values.pop("partial_rotary_factor", data.get("partial_rotary_factor"))
        if kind not in _KEYS:
            raise ValueError(
                f"config.json has rope_type {kind!r}; the supported ones are {', '.join(_KEYS)}. "
                "Choose a model with one of them."
            )
        if partial is not None:
            for name in _MULTIMODAL:
                values.pop(name, None)
        elif share not in (1, None):
            raise ValueError(
                f"config.json has partial_rotary_factor {share!r}; the supported value is 1. "
                "Choose a model that rotates whole heads."
            )
        unread = sorted(set(values) - set(_KEYS[kind]))
        if unread:
            raise ValueError(
                f"config.json has {', '.join(unread)} in its rotary settings; rope_type {kind!r} "
                f"reads {', '.join(('rope_theta', *_KEYS[kind]))}. Remove what does not belong."
            )
        if kind == "yarn":
            original = data.get("original_max_position_embeddings") or values.get(
                "original_max_position_embeddings", max_positions
            )
            values["original_max_position_embeddings"] = original
            values.setdefault("factor", max_positions / original)
        elif kind == "linear" and "factor" not in values:
            raise ValueError("config.json has rope_type 'linear' without a factor; add it.")
        share = share or partial or 1.0
        return cls(
            rope_type=kind, rope_theta=float(theta), partial_rotary_factor=float(share), **values
        )

    def to_hf(self) -> dict[str, Any]:
        """Both spellings, so that any release of transformers reads the same frequencies."""
        values = {name: getattr(self, name) for name in _KEYS[self.rope_type]}
        values = {name: value for name, value in values.items() if value is not None}
        written: dict[str, Any] = {"rope_theta": self.rope_theta}
        if self.rope_type != "default":
            written["rope_scaling"] = {"rope_type": self.rope_type, **values}
        written["rope_parameters"] = {"rope_type": self.rope_type, **written, **values}
        written["rope_parameters"].pop("rope_scaling", None)
        if self.partial_rotary_factor != 1:
            written["partial_rotary_factor"] = self.partial_rotary_factor
            written["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
        return written


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    r"""Angle per position of each pair of entries, and the factor on cosines and sines.

    default: f_i = theta^(-2i/H). linear: f_i / factor. yarn: a blend of both, by how often the pair
    turns in the original context.

    Args:
        rope: The settings.
        head_dim: Width H of a head, even.

    Returns:
        float32 [H/2] in radians per position, and the attention factor. Where only part of a head
        is rotated, H is the width of that part.
    """
    head_dim = rope.rotary_width(head_dim)
    base = rope.rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "linear":
        base = base / rope.factor
    if rope.rope_type != "yarn":
        return base.astype(np.float32), 1.0
    original = rope.original_max_position_embeddings or 1

    def dimension(turns: float) -> float:
        ratio = original / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    blended = base / rope.factor * slow + base * (1.0 - slow)
    return blended.astype(np.float32), _attention_factor(rope)


def _attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature as a factor on cosines and sines."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotation_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles at `positions`.

    The angles are float32 products of the position and the frequency, whatever the dtype of the
    network: bfloat16 cannot tell position 257 from 256.

    Args:
        rope: The settings.
        head_dim: Width H of a head.
        positions: int32 [...], each below 2^24.

    Returns:
        Two arrays float32 [..., H/2].
    """
    freqs, factor = frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * freqs
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn entry i and entry i + H/2 of each head by the angle of pair i.

    Args:
        x: [..., heads, H], any float dtype; entries beyond the H that are rotated stay.
        cos: float32 [..., H/2].
        sin: float32 [..., H/2].

    Returns:
        float32, in the shape of `x`.
    """
    half = cos.shape[-1]
    x = x.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned if rest.shape[-1] else turned[:2], axis=-1)
