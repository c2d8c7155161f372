"""Tiny random checkpoints of all families, written by transformers."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5, "rope_type": "default"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 12}),
    "qwen3-tied-yarn-bias": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3-linear-mha": (
        "qwen3",
        {"head_dim": 8, "num_key_value_heads": 4, "rope_parameters": LINEAR},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "qwen3_moe-normed-tied": (
        "qwen3_moe",
        {
            "tie_word_embeddings": True,
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5": ("qwen3_5", HYBRID),
    "qwen3_5-tied-bias-odd": (
        "qwen3_5",
        HYBRID
        | {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 3,
        },
    ),
}
# Sizes that 8 devices divide, for tests of sharded arrays.
EVEN = {"vocab_size": 96, "head_dim": 8, "attention_bias": True}
SHARDED: dict[str, tuple[str, dict[str, Any]]] = {
    "loads": ("qwen3", {**EVEN, "tie_word_embeddings": False}),
    "loads-moe": (
        "qwen3_moe",
        {
            **EVEN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "loads-hybrid": ("qwen3_5", {**HYBRID, **EVEN, "linear_value_head_dim": 8}),
}
CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One network twice: the transformers module and the directory that it was saved to."""

    name: str
    module: Any
    path: Path

    def gradients(self) -> dict[str, np.ndarray]:
        """The module's gradients under the names that checkpoints have."""
        return hub_names({k: x.grad.numpy() for k, x in self.module.named_parameters()})


def build(name: str) -> Any:
    """A transformers model with random weights, norms and biases included."""
    family, changes = {**CASES, **SHARDED}[name]
    config_class, model_class = CLASSES[family]
    module = model_class(config_class(**copy.deepcopy(COMMON | changes))).float().eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, value in module.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "conv1d" in key:
                noise *= 4.0  # large enough that the norm that follows does not amplify rounding
            centre = 0.0 if family == "qwen3_5" and "linear_attn" not in key else 1.0
            value.copy_(centre + 0.3 * noise if "norm" in key else 0.2 * noise)
    return module


def hub_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a module under the names that checkpoints have, one for each expert."""
    named = {}
    for name, tensor in tensors.items():
        stem, _, last = name.partition("experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if not stem or parts is None:
            named[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, piece in zip(parts, np.split(matrix, len(parts)), strict=True):
                named[f"{stem}experts.{expert}.{part}.weight"] = piece
    return named


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The checkpoint of a case by its name, made when it is first asked for."""

    @functools.cache
    def make(name):
        module = build(name)
        path = tmp_path_factory.mktemp("tiny") / name
        module.save_pretrained(path)
        return Pair(name, module, path)

    return make


@pytest.fixture(params=list(CASES))
def pair(request, pairs):
    return pairs(request.param)


@pytest.fixture(scope="session")
def tiny(pairs):
    """One qwen3 checkpoint, for tests that need no comparison over families."""
    return pairs("qwen3")


@pytest.fixture
def rng():
    return np.random.default_rng(0)
