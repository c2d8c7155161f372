"""Samplers from settings: a checkpoint on this process's devices, or a server."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from race_jax.rollout.http import HttpSampler, LogprobsMode
from race_jax.rollout.protocol import Sampler
from race_jax.types import LanguageModel, Params

if TYPE_CHECKING:
    from race_jax.models.sampler import LocalSampler


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Where turns are sampled.

    Attributes:
        kind: `local` loads the checkpoint here; `vllm` and `sglang` ask a server.
        address: Of the server, such as `http://127.0.0.1:8000`.
        logprobs_mode: What a vLLM server was started with, `raw` or `processed`.
        timeout: Seconds for one request to a server.
        concurrency: Requests at once to a server, from 1 to 100.
        dtype: Of the local network, `float32` or `bfloat16`.
        slots: Conversations in the local cache at a time.
        length: Most tokens of a conversation; by default the limit of a trajectory or the model's
            context, whichever is less.
        chunk: Most prompt tokens that are forwarded at a time, a power of two of at least 16.
        host_gib: Room on the host, in GiB, for local conversations that are idle and found no slot;
            one that finds no room is forwarded again if it goes on.
    """

    kind: Literal["local", "vllm", "sglang"] = "local"
    address: str | None = None
    logprobs_mode: LogprobsMode = "raw"
    timeout: float = 600.0
    concurrency: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 8
    length: int | None = None
    chunk: int = 256
    host_gib: float = 16.0

    def __post_init__(self):
        if (self.address is None) != (self.kind == "local"):
            need = "takes none" if self.kind == "local" else "needs the server's"
            raise ValueError(f"address is {self.address!r}; a sampler of kind {self.kind!r} {need}")
        if not 0 <= self.host_gib < math.inf:
            raise ValueError(f"host_gib is {self.host_gib}; it must be finite and at least 0")


def make_sampler(config: SamplerConfig, model: str, most_tokens: int, known: int) -> Sampler:
    """Build a sampler.

    Args:
        config: Where and how.
        model: Hugging Face directory of the checkpoint; a server has loaded its own.
        most_tokens: Most tokens of a trajectory.
        known: The tokenizer's length; ids from here on are never sampled.

    Raises:
        ValueError: A setting does not fit, or the checkpoint cannot be read.
        ConnectionError: The server is down.
    """
    if config.kind != "local":
        assert config.address is not None
        return HttpSampler(
            config.kind,
            config.address,
            logprobs_mode=config.logprobs_mode,
            context_length=config.length,
            known=known,
            concurrency=config.concurrency,
            timeout=config.timeout,
        )
    from race_jax.models import load_model
    from race_jax.train.runtime import enable_compilation_cache

    enable_compilation_cache()
    network = load_model(model, dtype=config.dtype)
    return local_sampler(config, network, network.params, most_tokens, known)


def local_sampler(
    config: SamplerConfig, network: LanguageModel, params: Params, most_tokens: int, known: int
) -> LocalSampler:
    """A sampler on this process's devices.

    Args:
        config: Its sizes.
        network: Pure forward functions.
        params: Of the network.
        most_tokens: Most tokens of a trajectory.
        known: The tokenizer's length; ids from here on are never sampled.

    Raises:
        ValueError: A setting does not fit.
    """
    from race_jax.models.sampler import LocalSampler

    return LocalSampler(
        network,
        params,
        known=min(known, network.vocab_size),
        slots=config.slots,
        length=min(config.length or most_tokens, network.context_length),
        chunk=config.chunk,
        host_bytes=int(config.host_gib * 2**30),
    )
