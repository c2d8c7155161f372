"""Multimodal checkpoints: their language model is read, the rest left aside, and what cannot be."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers

from race_jax.models import ModelConfig, load_config, load_model, save_model

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,  # or a norm would enlarge the rounding of what is read near 0
    "rope_parameters": {
        "rope_theta": 1e5,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
IDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A multimodal network with random weights, and the directory that it was saved to."""
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, **IDS)
    module = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            # Large where the norms that follow would amplify rounding otherwise.
            large = "conv1d" in name or "embed_tokens" in name
            value.add_(noise * (0.8 if large else 0.2))
    path = tmp_path_factory.mktemp("multimodal") / "model"
    module.save_pretrained(path)
    return module, path


def test_the_language_model_of_a_multimodal_checkpoint_and_back(whole, tmp_path):
    module, path = whole
    stored = json.loads((path / "config.json").read_text())
    assert stored["model_type"] == "qwen3_5" and "text_config" in stored
    tokens = np.random.default_rng(0).integers(0, 90, (2, 70))
    with torch.no_grad():
        want = module(input_ids=torch.tensor(tokens)).logits.numpy()
    model = load_model(path)
    positions = np.broadcast_to(np.arange(70), tokens.shape)

    @jax.jit
    def logits(params):
        states = model.forward(params, tokens, positions, np.ones_like(tokens))
        return states @ model.head(params).T

    got = np.asarray(logits(model.params))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-4)
    save_model(model, tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert isinstance(again, transformers.Qwen3_5ForCausalLM)
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(tokens)).logits, got, atol=1e-4)
    assert load_config(tmp_path / "text") == model.config


@pytest.mark.parametrize(
    ("outer", "inner", "parts"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ["quantization_config", "fp8"]),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        (
            {},
            {"layer_types": ["mamba"] + ["full_attention"] * 3},
            ["'mamba' for block 0", "linear_attention, full_attention"],
        ),
        ({}, {"layer_types": ["full_attention"]}, ["names 1 blocks", "num_hidden_layers is 4"]),
        (
            {},
            {"linear_num_value_heads": 3},
            ["linear_num_value_heads is 3", "linear_num_key_heads is 2", "must divide"],
        ),
        ({}, {"num_key_value_heads": 3}, ["num_key_value_heads is 3", "must divide"]),
        ({}, {"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim is 1"]),
        ({}, {"linear_key_head_dim": 0}, ["linear_key_head_dim is 0", "above 0"]),
        ({}, {"attn_output_gate": False}, ["attn_output_gate false"]),
        ({}, {"model_type": "qwen3"}, ["text_config.model_type 'qwen3'", "'qwen3_5_text'"]),
        ({"text_config": None}, {}, ["no text_config"]),
    ],
)
def test_configurations_that_do_not_fit_are_refused(whole, tmp_path, outer, inner, parts):
    shutil.copytree(whole[1], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    data = json.loads(file.read_text())
    data["text_config"] |= inner
    file.write_text(json.dumps(data | outer))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_model(tmp_path / "model")
    for part in [str(file), *parts]:
        assert part in str(caught.value)


def test_sizes_of_deltanet_belong_to_hybrids():
    with pytest.raises(ValueError, match=r"linear_num_key_heads is 2.*attention in every block"):
        ModelConfig("qwen3", 100, 32, 64, 2, 4, linear_num_key_heads=2)
