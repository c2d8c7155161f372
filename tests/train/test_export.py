import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sft_samples
from rich.console import Console

from race_jax.checkpoint import Checkpoints
from race_jax.models import load_model
from race_jax.tokenizer import load_tokenizer
from race_jax.train.cli import main
from race_jax.train.export_cli import choose_step, export
from race_jax.train.optimizer import LoraConfig
from race_jax.train.sft import sft
from race_jax.train.sft_setup import Run

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return sft_samples.make_workspace(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def full(work):
    config = sft_samples.make_config(work, work / "full", steps=2, eval_every=1, save_every=1)
    sft(config, console=QUIET)
    return config


@pytest.fixture(scope="module")
def adapted(work):
    """A run with adapters, in two parts."""
    config = sft_samples.make_config(work, work / "lora", steps=3, lora=LoraConfig(rank=2))
    sft(config, console=QUIET, until=2)
    sft(config, console=QUIET)
    return config


def logits_of(model, ids):
    places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = jax.jit(model.forward)(model.params, jnp.asarray(ids), places, jnp.ones_like(ids))
    return np.asarray(hidden @ model.head(model.params).T)


def trained_logits(config, ids):
    """Of the run's own state, as its steps compute."""
    run = Run(config, QUIET)
    with Checkpoints(f"{config.out}/checkpoints") as checkpoints:
        state = run.start(checkpoints)
    params = run.trainee.params(state.trained, run.frozen)
    return logits_of(dataclasses.replace(run.model, params=params), ids)


@pytest.mark.parametrize("which", ["full", "adapted"])
def test_transformers_gives_the_logits_of_the_run(which, tmp_path, request):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = request.getfixturevalue(which)
    out = tmp_path / "hf"
    assert export(config.out, str(out), step="latest", dtype="float32") == 0
    ids = np.random.default_rng(0).integers(0, 30, (2, 25))
    expected = trained_logits(config, ids)
    start = logits_of(load_model(config.model), ids)
    assert np.abs(expected - start).max() > 1e-2
    np.testing.assert_allclose(logits_of(load_model(out), ids), expected, atol=1e-5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        got = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_adapters_leave_the_embedding_and_move_every_linear_layer(adapted, tmp_path):
    export(adapted.out, str(tmp_path / "hf"), dtype="float32")
    before, after = load_model(adapted.model).params, load_model(tmp_path / "hf").params
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), before, after)
    assert same["embed"] and same["norm"] and same["layers"]["attention_norm"]
    moved = [same["layers"]["attention"][n] for n in ("query", "key", "value", "out")]
    moved += [same["layers"]["mlp"][n] for n in ("gate", "up", "down")]
    assert not any(moved)


def test_tokenizer_template_and_generation_settings_come_along(full, tmp_path):
    out = tmp_path / "hf"
    export(full.out, str(out))
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((out / "generation_config.json").read_text()) == {"do_sample": True}
    theirs, ours = load_tokenizer(out), load_tokenizer(full.model)
    assert theirs.get_vocab() == ours.get_vocab()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_without_generation_settings_learns_where_a_turn_ends(full, tmp_path):
    # Without it a server would stop at nothing, or at the base model's end of text.
    base = tmp_path / "base"
    sft_samples.make_checkpoint(base)
    (base / "generation_config.json").unlink()
    export(full.out, str(tmp_path / "hf"), model=str(base))
    found = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    tokenizer = load_tokenizer(base)
    assert found["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_steps_are_chosen_by_name_or_number(full):
    with Checkpoints(f"{full.out}/checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == (1, 2)
        assert choose_step(checkpoints, "latest") == 2
        assert choose_step(checkpoints, "best") == checkpoints.best == 2
        assert choose_step(checkpoints, "1") == 1
        for wrong in ("3", "first", "-1"):
            with pytest.raises(ValueError, match="choose best, latest or one of 1, 2"):
                choose_step(checkpoints, wrong)


def test_a_wrong_call_is_told_and_writes_nothing(work, full, tmp_path, capsys):
    other = sft_samples.make_checkpoint(tmp_path / "other", seed=5)
    out = str(tmp_path / "hf")
    for arguments, message in (
        (["gone", out], "gone/checkpoints: no such folder of checkpoints"),
        ([full.out, out, "--step", "7"], "one of 1, 2"),
        ([full.out, out, "--model", str(other)], "is not the model that"),
        ([full.out, full.model], "is the model that the run began with"),
        ([full.out, out, "--dtype", "float16"], "dtype"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert main(["export", str(tmp_path / "empty"), out]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
