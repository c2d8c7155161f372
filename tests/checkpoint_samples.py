"""A tiny random Qwen3 in the ordinary format, with the tokenizer of the embedded world."""

from race_jax.envs.potion_text import words
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.models import ModelConfig, init_model, save_model


def tiny_config(vocab, **changes):
    return ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": vocab,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1024,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            **changes,
        }
    )


def save_tiny(folder, size=5, seed=0, **changes):
    """Write a checkpoint for a world of `size`; returns the folder's name."""
    tokenizer = word_tokenizer(words(size))
    save_model(init_model(tiny_config(len(tokenizer), **changes), seed), folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
