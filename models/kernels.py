"""Which implementation of attention runs, and the two that are written for one kind of device.

    xla     blocks of queries in plain XLA, on every backend, in float32 too
    cudnn   cuDNN's flash attention, on NVIDIA GPUs, in bfloat16
    splash  JAX's Pallas kernel for TPUs, in bfloat16

Both kernels multiply in bfloat16, so float32 models always take the first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.extend.backend import get_backend

from race_jax.models.attention import segment_attention

KERNELS = ("xla", "cudnn", "splash")
_CHUNKS = 16  # pieces of a row whose masks are made one at a time, at most
_PIECE = 1024  # fewest queries of such a piece
_BLOCK = 512  # queries and keys of one step of the Pallas kernel
_LANES = 128  # what a TPU's vectors hold, and its blocks are multiples of
_PLATFORMS = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}

_target = jax.make_user_context("")


@contextlib.contextmanager
def compile_for(backend: str) -> Iterator[None]:
    """Within it, kernels are chosen for devices of another kind than this process runs on.

    For ahead-of-time compilation; programs traced inside cannot run here.

    Args:
        backend: `cpu`, `gpu` or `tpu`.

    Example:
        >>> with compile_for("tpu"):
        ...     choose_kernel("auto", jnp.bfloat16, 128)
        'splash'
    """
    if backend not in _PLATFORMS:
        raise ValueError(f"backend is {backend!r}; choose cpu, gpu or tpu.")
    with _target(backend):
        yield


def target_backend() -> str:
    """`cpu`, `gpu` or `tpu`: what the surrounding `compile_for` names, or what JAX runs on."""
    return _target.value or jax.default_backend()


def check_choices(attention: str, cached: str) -> None:
    """Raise for a name that is no choice. Whether it can run here shows when it is to run."""
    if attention not in ("auto", *KERNELS):
        raise ValueError(f"attention is {attention!r}; choose auto, {', '.join(KERNELS)}.")
    if cached not in ("auto", "blocked", "gathered"):
        raise ValueError(f"cached_attention is {cached!r}; choose auto, blocked or gathered.")


def choose_kernel(attention: str, dtype: jnp.dtype, head_dim: int) -> str:
    """The implementation that `attention` stands for.

    `auto` is `splash` on TPUs and `cudnn` on NVIDIA GPUs for bfloat16, and `xla` for all else: for
    float32, on CPUs, and for heads that cuDNN does not take.

    Args:
        attention: `auto`, `xla`, `cudnn` or `splash`.
        dtype: Of queries, keys and values.
        head_dim: Width of a head.

    Returns:
        `xla`, `cudnn` or `splash`.

    Raises:
        ValueError: If that one cannot run here.

    Example:
        >>> choose_kernel("auto", jnp.float32, 128)
        'xla'
    """
    check_choices(attention, "auto")
    backend = target_backend()
    if attention == "auto":
        half = dtype == jnp.bfloat16
        if half and backend == "tpu":
            return "splash"
        if half and backend == "gpu" and _has_cudnn() and _cudnn_takes(head_dim):
            return "cudnn"
        return "xla"
    if attention == "xla":
        return "xla"
    wanted = {"cudnn": "gpu", "splash": "tpu"}[attention]
    if backend != wanted or (attention == "cudnn" and not _has_cudnn()):
        kind = {"cudnn": "NVIDIA GPUs", "splash": "TPUs"}[attention]
        raise ValueError(
            f"attention is {attention}, which runs on {kind}, and this program is for the backend "
            f"{backend}; choose auto or xla, or install the JAX that drives your {kind}."
        )
    if dtype != jnp.bfloat16:
        raise ValueError(
            f"attention is {attention}, which multiplies in bfloat16, and the model is in "
            f"{jnp.dtype(dtype).name}; load it with dtype bfloat16, or choose auto or xla."
        )
    if attention == "cudnn" and not _cudnn_takes(head_dim):
        raise ValueError(
            f"attention is cudnn, and head_dim is {head_dim}; cuDNN takes multiples of 8 up to "
            f"{_cudnn_limit()} on this GPU. Choose auto or xla."
        )
    return attention


def kernel_attention(
    kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """`segment_attention` by the implementation that `choose_kernel` returned.

    Args:
        kernel: `xla`, `cudnn` or `splash`.
        q: [B, T, N, H].
        k: [B, T, K, H]; query head n reads key head n // (N / K).
        v: [B, T, K, H].
        segment_ids: int32 [B, T]; 0 = padding, which sees padding alone.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    run = {"xla": segment_attention, "cudnn": cudnn_attention, "splash": splash_attention}[kernel]
    return run(q, k, v, segment_ids)


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """As `segment_attention`, by cuDNN's flash attention.

    cuDNN itself knows causal masks and lengths of rows, but not several segments in one row. So it
    is given an explicit mask, for one piece of the queries at a time: a piece sees the keys up to
    its own end, and its mask [piece, keys] is made, and made again in the backward pass, when its
    turn comes.

    Args:
        q: [B, T, N, H], bfloat16.
        k: [B, T, K, H].
        v: [B, T, K, H].
        segment_ids: int32 [B, T].
        implementation: `xla` runs the same calls without cuDNN, to check them.

    Returns:
        [B, T, N, H].
    """
    length = q.shape[1]
    pad = -length % 64  # cuDNN takes a mask only for even numbers of tokens
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))
    piece = max(_PIECE, -(-(length + pad) // (_CHUNKS * 64)) * 64)

    @jax.checkpoint
    def part(q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array, seen: jax.Array):
        size, total = q.shape[1], k.shape[1]
        causal = jnp.arange(total - size, total)[:, None] >= jnp.arange(total)
        allowed = (own[:, :, None] == seen[:, None, :]) & causal
        return jax.nn.dot_product_attention(
            q, k, v, mask=allowed[:, None], implementation=implementation
        )

    parts = []
    for start in range(0, length + pad, piece):
        end = min(start + piece, length + pad)
        own = ids[:, start:end]
        parts.append(part(q[:, start:end], k[:, :end], v[:, :end], own, ids[:, :end]))
    return jnp.concatenate(parts, axis=1)[:, :length]


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """As `segment_attention`, by JAX's Pallas kernel for TPUs.

    Rows are padded to whole blocks with tokens of segment 0.

    Args:
        q: [B, T, N, H].
        k: [B, T, K, H].
        v: [B, T, K, H].
        segment_ids: int32 [B, T].
        interpret: Run the kernel without a TPU, slowly, to check it.

    Returns:
        [B, T, N, H] in the dtype of `q`.
    """
    length, heads, width = q.shape[1:]
    block = min(_BLOCK, -(-length // _LANES) * _LANES)
    pad = (0, -length % block)
    q = (q / math.sqrt(width)).astype(q.dtype)
    q, k, v = (jnp.pad(x, ((0, 0), pad, (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
    ids = jnp.pad(segment_ids, ((0, 0), pad))
    total = ids.shape[1]
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((total, total))] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    out = cast(jax.Array, jax.vmap(kernel)(q, k, v, splash.SegmentIds(ids, ids)))
    return out.swapaxes(1, 2)[:, :length].astype(q.dtype)


def _has_cudnn() -> bool:
    """Whether the target's GPUs are NVIDIA's; taken for granted when compiling for other hosts."""
    return bool(_target.value) or "cuda" in get_backend().platform_version


def _cudnn_takes(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= _cudnn_limit()


def _cudnn_limit() -> int:
    """The widest head: 256 from Hopper (compute capability 9.0) on, 128 before."""
    if _target.value:
        return 128
    device = jax.local_devices()[0]
    return 256 if tuple(map(int, device.compute_capability.split("."))) >= (9, 0) else 128
