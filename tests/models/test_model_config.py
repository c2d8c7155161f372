"""Configurations: read from `config.json`, written back, refused when not implemented."""

import dataclasses
import json

import pytest
import transformers

from race_jax.models import FAMILIES, ModelConfig

BASE = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_reads_a_file_of_transformers_4():
    config = ModelConfig.from_hf(
        {
            **BASE,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
        }
    )
    assert (config.head_dim, config.rms_norm_eps, config.rope.rope_theta) == (8, 1e-5, 1e6)
    assert config.tie_word_embeddings and config.context_length == 4096
    assert config.qkv_bias and not config.out_bias
    assert config.extra["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_missing_keys_mean_what_they_mean_to_transformers(family):
    made = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[family](
        **{k: v for k, v in BASE.items() if k != "model_type"}
    )
    config = ModelConfig.from_hf({**BASE, "model_type": family})
    assert config.head_dim == getattr(made, "head_dim", 32 // 4)
    assert config.rms_norm_eps == made.rms_norm_eps
    assert config.tie_word_embeddings == made.tie_word_embeddings
    assert config.max_position_embeddings == made.max_position_embeddings
    assert config.rope.rope_theta == made.rope_parameters["rope_theta"]
    assert config.initializer_range == made.initializer_range


def test_missing_or_null_key_value_heads_are_the_query_heads():
    for data in ({**BASE, "num_key_value_heads": None}, dict(BASE)):
        data.pop("num_key_value_heads") if data["num_key_value_heads"] else None
        assert ModelConfig.from_hf(data).num_key_value_heads == 4


def test_biases_by_family():
    assert ModelConfig.from_hf({**BASE, "attention_bias": False}).qkv_bias
    plain = ModelConfig.from_hf({**BASE, "model_type": "qwen3"})
    assert not plain.qkv_bias and not plain.out_bias
    biased = ModelConfig.from_hf({**BASE, "model_type": "qwen3", "attention_bias": True})
    assert biased.qkv_bias and biased.out_bias


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_written_form_reads_back_and_keeps_foreign_keys(family):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    data = {
        **BASE,
        "model_type": family,
        "rope_scaling": yarn,
        "eos_token_id": [1, 2],
        "head_dim": 16,
    }
    config = ModelConfig.from_hf(data)
    written = json.loads(json.dumps(config.to_hf()))
    again = ModelConfig.from_hf(written)
    assert again == config and again.extra["eos_token_id"] == [1, 2]
    assert written["architectures"] == [FAMILIES[family].architecture]
    assert ModelConfig.from_hf(again.to_hf()) == config


def test_yarn_stretches_the_context():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = ModelConfig.from_hf({**BASE, "max_position_embeddings": 1024, "rope_scaling": yarn})
    assert config.context_length == 4096


def test_inactive_sliding_windows_are_read():
    window = {**BASE, "use_sliding_window": True, "sliding_window": 8}
    ModelConfig.from_hf({**window, "max_window_layers": 2})
    ModelConfig.from_hf({**window, "layer_types": ["full_attention"] * 2})
    ModelConfig.from_hf({**window, "sliding_window": None, "max_window_layers": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'; the supported ones are qwen2, qwen3"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": None}, "model_type None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}; supported: none"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported: 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1; supported: 0"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "use_sliding_window true with sliding_window 8 on 1 layers",
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention"],
            },
            "on 2 layers",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a whole number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"intermediate_size": "64"}, "intermediate_size is '64'"),
        ({"num_key_value_heads": 3}, "must divide the first"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": ["qwen3"]}, "model_type .* must be a text"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6'; it must be a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps True; it must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; it must be true or false"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn'; it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor '2'"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": 2}, "must be a list"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": "2"},
            "num_hidden_layers is '2'",
        ),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**BASE, **change})


def test_direct_construction():
    config = ModelConfig("qwen3", 100, 32, 64, 2, 4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert hash(config) == hash(dataclasses.replace(config, extra={"a": 1}))
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        dataclasses.replace(config, model_type="gpt2")
