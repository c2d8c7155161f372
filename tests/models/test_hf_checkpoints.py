"""Checkpoints: read, written and read again by both sides, and refused with the reason."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from race_jax.models import hf, load_model, save_model
from race_jax.models.shards import write_safetensors

QUERY = "model.layers.1.self_attn.q_proj.weight"


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a.params, b.params))


@pytest.fixture
def copy(tiny, tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(tiny.path, tmp_path / "model")


def rewrite(directory, change):
    """Let `change` edit the tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refuse(directory, error, *parts):
    with pytest.raises(error) as caught:
        load_model(directory)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("shard_bytes", [5e9, 20_000])
def test_saved_models_are_equal_in_transformers(pair, tmp_path, shard_bytes):
    save_model(load_model(pair.path), tmp_path / "out", shard_bytes=shard_bytes)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert type(again) is type(pair.module)
    for name, value in pair.module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        # Equal weights; experts may be multiplied in another order.
        torch.testing.assert_close(
            again(tokens).logits, pair.module(tokens).logits, atol=1e-5, rtol=0
        )
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3 if shard_bytes == 20_000 else len(shards) == 1
    assert same(load_model(tmp_path / "out"), load_model(pair.path))


def test_shards_keep_to_their_size(tiny, tmp_path):
    save_model(load_model(tiny.path), tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        size = sum(value.nbytes for value in tensors.values())
        assert size <= 30_000
        total += size
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_and_wanted_dtypes(tiny, tmp_path, stored, dtype):
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny.path, dtype=stored)
    module.save_pretrained(tmp_path / "stored")
    model = load_model(tmp_path / "stored", dtype)
    wanted = torch.float32 if dtype == "float32" else torch.bfloat16
    want = module.state_dict()[QUERY].to(wanted).float().numpy()
    query = np.asarray(model.params["layers"]["attention"]["query"][1], np.float32)
    np.testing.assert_array_equal(query.reshape(32, -1).T, want)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {dtype}
    save_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert same(load_model(tmp_path / "out", dtype), model)
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert kept.dtype == wanted


def test_context_length_in_place_of_the_file(tiny):
    assert load_model(tiny.path).context_length == 256
    assert load_model(tiny.path, context_length=99).context_length == 99
    with pytest.raises(ValueError, match="context length is 0"):
        load_model(tiny.path, context_length=0)


def test_unsupported_dtype(tiny):
    with pytest.raises(ValueError, match="dtype is 'int8'; choose float32 or bfloat16"):
        load_model(tiny.path, "int8")


def test_frequencies_that_old_checkpoints_store_are_ignored(copy):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32),
        "model.rotary_emb.inv_freq": np.ones(6, np.float32),
    }
    rewrite(copy, lambda tensors: tensors.update(extra))
    load_model(copy)


def test_a_tied_checkpoint_may_store_its_head_again(copy):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(copy, tie)
    edit_config(copy, tie_word_embeddings=True)
    assert "head" not in load_model(copy).params


def test_a_tied_checkpoint_with_another_head_is_refused(copy):
    edit_config(copy, tie_word_embeddings=True)
    refuse(copy, ValueError, "lm_head.weight", "tie_word_embeddings to false")


def test_an_untied_checkpoint_without_a_head_is_refused(copy):
    rewrite(copy, lambda tensors: tensors.pop("lm_head.weight"))
    refuse(copy, ValueError, "lacks lm_head.weight")


def test_unknown_tensors(copy):
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(copy, lambda tensors: tensors.update({name: np.zeros(48, np.float32)}))
    refuse(copy, ValueError, name, "qwen3", "model.safetensors")


def test_layers_beyond_the_configuration(copy):
    edit_config(copy, num_hidden_layers=2, layer_types=None)
    refuse(copy, ValueError, "model.layers.2.")


def test_missing_tensors(copy):
    rewrite(copy, lambda tensors: tensors.pop(QUERY))
    refuse(copy, ValueError, f"lacks {QUERY}")


def test_many_missing_tensors_are_counted(copy):
    edit_config(copy, num_hidden_layers=4, layer_types=None)
    refuse(copy, ValueError, "model.layers.3.input_layernorm.weight", "and 6 more")


def test_wrong_shapes(copy):
    rewrite(copy, lambda tensors: tensors.update({QUERY: tensors[QUERY].T.copy()}))
    refuse(copy, ValueError, QUERY, "(32, 48)", "(48, 32)")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_unsupported_storage(copy, dtype):
    rewrite(copy, lambda tensors: tensors.update({QUERY: tensors[QUERY].astype(dtype)}))
    refuse(copy, ValueError, QUERY, "supported are F32, F16, BF16")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(copy, ValueError, str(file), "Copy it again")


def test_files_of_another_kind(copy):
    (copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    refuse(copy, ValueError, "not a complete safetensors file")


def test_missing_files(copy, tmp_path):
    refuse(tmp_path / "nowhere", FileNotFoundError, "nowhere is not a directory")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refuse(copy, FileNotFoundError, "neither model.safetensors nor", "save_pretrained")
    (copy / "model.safetensors").mkdir()
    refuse(copy, FileNotFoundError, "neither model.safetensors nor", "save_pretrained")
    (copy / "config.json").unlink()
    refuse(copy, FileNotFoundError, "config.json is missing")


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', b"\xff\xfe{}", "[" * 100_000])
def test_damaged_config(copy, text):
    data = text if isinstance(text, bytes) else text.encode()
    (copy / "config.json").write_bytes(data)
    refuse(copy, ValueError, str(copy / "config.json"))


def test_unsupported_architecture_names_the_file(copy):
    edit_config(copy, model_type="llama")
    refuse(copy, ValueError, str(copy / "config.json"), "llama", "qwen2, qwen3")


def test_missing_shards(tiny, tmp_path):
    save_model(load_model(tiny.path), tmp_path / "out", shard_bytes=20_000)
    lost = sorted((tmp_path / "out").glob("model-*"))[1]
    lost.unlink()
    refuse(tmp_path / "out", FileNotFoundError, f"lacks {lost.name}")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": 3}', "{"])
def test_damaged_index(copy, text):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(text)
    refuse(copy, ValueError, "model.safetensors.index.json")


def test_a_tensor_in_two_shards(tiny, tmp_path):
    out = tmp_path / "out"
    save_model(load_model(tiny.path), out, shard_bytes=20_000)
    first, second = sorted(out.glob("model-*"))[:2]
    tensors = load_file(first)
    save_file({**load_file(second), **tensors}, second)
    refuse(out, ValueError, next(iter(tensors)), first.name, second.name)


def test_saving_over_an_older_save_leaves_no_stale_weights(tiny, tmp_path):
    model, out = load_model(tiny.path), tmp_path / "out"
    save_model(model, out, shard_bytes=20_000)
    (out / "tokenizer.json").write_text("{}")
    save_model(model, out)
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    save_model(model, out, shard_bytes=40_000)
    assert not (out / "model.safetensors").exists() and same(load_model(out), model)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_changes_nothing(tiny, tmp_path, monkeypatch, exists):
    model, out = load_model(tiny.path), tmp_path / "out"
    if exists:
        save_model(model, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()} if exists else None
    calls = []

    def full(path, *rest):
        if calls:
            raise OSError(28, "No space left on device")
        calls.append(path)
        write_safetensors(path, *rest)

    monkeypatch.setattr(hf, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(model, out, shard_bytes=20_000)
    assert calls
    after = {file.name: file.read_bytes() for file in out.iterdir()} if out.exists() else None
    assert after == before
    assert [file.name for file in tmp_path.iterdir()] == (["out"] if exists else [])


def test_saved_directories_have_ordinary_permissions(tiny, tmp_path):
    save_model(load_model(tiny.path), tmp_path / "out")
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_save_refusals(tiny, tmp_path):
    model = load_model(tiny.path)
    with pytest.raises(ValueError, match="shard_bytes is 0; it must be above 0"):
        save_model(model, tmp_path / "out", shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; give a directory"):
        save_model(model, tmp_path / "file")
