import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sft_samples
from config_samples import check_whole, files_of, parsed
from rich.console import Console

from race_jax.checkpoint import Checkpoints
from race_jax.train import sft_setup
from race_jax.train.cli import main
from race_jax.train.optimizer import OptimizerConfig
from race_jax.train.sft import sft
from race_jax.train.sft_setup import MeshConfig, Run, SftConfig
from race_jax.train.step import ComputeConfig

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return sft_samples.make_workspace(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def whole(work):
    """A run of six steps in one go."""
    config = sft_samples.make_config(work, work / "whole")
    assert sft(config, console=QUIET) == 0
    return config


def state_of(config):
    with Checkpoints(f"{config.out}/checkpoints") as checkpoints:
        return jax.tree.map(np.asarray, Run(config, QUIET).start(checkpoints))


def told(config):
    """The metrics, without those that a clock or the system decides."""
    with open(f"{config.out}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    return [
        {k: v for k, v in r.items() if not k.startswith(("speed/", "memory/"))} for r in records
    ]


def test_a_run_in_three_parts_is_the_run_in_one_bit_for_bit(work, whole, tmp_path):
    # Six rows make an epoch and a batch has two: the run stops inside the first epoch and inside
    # the second.
    config = dataclasses.replace(whole, out=str(tmp_path / "parts"))
    for until in (2, 4, None):
        sft(config, console=QUIET, until=until)
    epochs = [r["train/epoch"] for r in told(whole) if "train/epoch" in r]
    assert not {epochs[1] % 1, epochs[3] % 1} & {0.0}
    jax.tree.map(np.testing.assert_array_equal, state_of(config), state_of(whole))
    assert told(config) == told(whole)


def test_held_out_loss_falls_and_its_numbers_are_written(whole):
    losses = [r["eval/loss"] for r in told(whole) if "eval/loss" in r]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    with Checkpoints(f"{whole.out}/checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == (6,)
        assert checkpoints.notes(6)["loss"] == losses[-1]
        assert checkpoints.notes(6)["settings"]["optimizer"]["lr"] == whole.optimizer.lr


def test_other_settings_are_refused_by_name(work, whole):
    before = state_of(whole)
    other = dataclasses.replace(
        whole,
        seed=1,
        optimizer=OptimizerConfig(lr=0.5, warmup=0.0),
        data=dataclasses.replace(whole.data, held_out=0.3),
    )
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        sft(other, console=QUIET)
    for part in ("optimizer.lr was 0.01 and is now 0.5", "data.held_out was 0.2", "seed was 0"):
        assert part in str(error.value)
    jax.tree.map(np.testing.assert_array_equal, state_of(whole), before)


def test_settings_that_change_no_result_may_change(whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "run"))
    sft(config, console=QUIET, until=3)
    other = dataclasses.replace(
        config,
        compute=ComputeConfig(dtype="float32", micro_batches=2, remat="none", head_chunk=8),
        mesh=MeshConfig(data=-1, fsdp=1),
        save_every=2,
        keep=1,
    )
    sft(other, console=QUIET)
    got, expected = state_of(other), state_of(whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got, expected)


def test_a_finished_run_has_nothing_left_to_do(whole, capsys):
    before = told(whole)
    assert sft(whole) == 0
    assert "6 of 6 steps done" in capsys.readouterr().out
    assert told(whole) == before


def test_a_signal_saves_and_ends_well_and_the_run_goes_on(work, whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "run"), steps=2000, eval_every=2000)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sft_samples\n"
        "from race_jax.train.sft import sft; from pathlib import Path\n"
        "c = sft_samples.make_config(Path(sys.argv[2]), sys.argv[3], steps=2000, eval_every=2000)\n"
        "sys.exit(sft(c))"
    )
    args = [sys.executable, "-c", script, os.path.dirname(sft_samples.__file__), work, config.out]
    child = subprocess.Popen([str(a) for a in args], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    path = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and b'"step": 3' in path.read_bytes()):
        assert child.poll() is None
        assert time.monotonic() < deadline, "the run never began"
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 0
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.latest
    assert step is not None and step >= 3
    assert told(config)[-1]["step"] == step
    assert int(state_of(config).step) == step


def test_steps_that_are_not_finite_stop_the_run_after_several(whole, tmp_path, monkeypatch):
    calls = []

    def poisoned(logprobs, batch):
        calls.append(1)
        return jnp.sum(logprobs) * jnp.nan, jnp.float32(1)

    monkeypatch.setattr(sft_setup, "sft_loss", poisoned)
    config = dataclasses.replace(
        whole,
        out=str(tmp_path / "run"),
        optimizer=dataclasses.replace(whole.optimizer, patience=2),
        save_every=1,
    )
    with pytest.raises(FloatingPointError, match="2 steps in a row, the last of them step 2"):
        sft(config, console=QUIET)
    assert calls
    assert [r["train/skipped"] for r in told(config) if "train/skipped" in r] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"length": 2048}}, "data.length is 2048, and the model's context has 1024"),
        ({"data": {"path": "gone.jsonl"}}, "gone.jsonl"),
        ({"data": {"success": "required", "length": 8}}, "data.length 8 is below the longest turn"),
        ({"compute": ComputeConfig(micro_batches=1), "track": ("nothing",)}, "track names"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(work, tmp_path, changes, message):
    config = sft_samples.make_config(work, tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        sft(config, console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_or_too_narrow_is_told(work, tmp_path):
    config = sft_samples.make_config(work, tmp_path / "run", model=str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone is not a directory"):
        sft(config, console=QUIET)
    narrow = sft_samples.make_checkpoint(tmp_path / "narrow", vocab_size=30)
    config = sft_samples.make_config(work, tmp_path / "run", model=str(narrow))
    with pytest.raises(ValueError, match="tokenizer and model do not belong together"):
        sft(config, console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["steps", "log_every", "eval_every", "save_every", "keep"])
def test_a_count_below_one_is_named(work, field):
    with pytest.raises(ValueError, match=f"{field} is 0; it must be at least 1"):
        sft_samples.make_config(work, "out", **{field: 0})


def test_fields_that_do_not_fit_together_are_named(work):
    with pytest.raises(ValueError, match=r"micro_batches is 3; it must divide data\.batch_size"):
        sft_samples.make_config(work, "out", compute=ComputeConfig(micro_batches=3))
    with pytest.raises(ValueError, match="eval_batches is 0"):
        sft_samples.make_config(work, "out", eval_batches=0)
    with pytest.raises(ValueError, match="seed is -1"):
        sft_samples.make_config(work, "out", seed=-1)


class TestCommandLine:
    def yaml(self, work, tmp_path, extra=""):
        path = tmp_path / "run.yaml"
        path.write_text(
            f"model: {work}/model\nout: {tmp_path}/run\nsteps: 6\n"
            f"data: {{path: {work}/train.jsonl, length: 512, batch_size: 2, reasoning: full,\n"
            f"  held_out: 0.2}}\n"
            f"optimizer: {{lr: 0.01, warmup: 0.0}}\n"
            f"compute: {{dtype: float32, head_chunk: 64}}\neval_every: 3\n{extra}"
        )
        return str(path)

    def test_a_file_and_a_field_after_it(self, work, whole, tmp_path, monkeypatch):
        seen = []
        monkeypatch.setattr("race_jax.train.sft.sft", lambda config: seen.append(config) or 0)
        path = self.yaml(work, tmp_path)
        assert main(["sft", "--config", path, "--optimizer.lr", "0.5", "--data.held-out", "0"]) == 0
        config = seen[0]
        assert isinstance(config, SftConfig)
        assert (config.optimizer.lr, config.data.held_out, config.steps) == (0.5, 0.0, 6)
        assert config.compute == whole.compute

    @pytest.mark.parametrize(
        ("extra", "arguments", "message"),
        [
            ("learning_rate: 1\n", [], "'learning_rate' is not accepted"),
            ("", ["--optimizer.rate", "1"], "--optimizer.rate"),
            ("", ["--optimizer.lr", "fast"], "optimizer.lr"),
            ("", ["--optimizer.lr", "0"], "optimizer.lr is 0.0; it must be above 0 and finite."),
            ("", ["--optimizer.lr", "nan"], "optimizer.lr"),
            ("", ["--optimizer.lr", ".inf"], "optimizer.lr is inf; it must be above 0 and finite."),
            ("steps: [1\n", [], 'run.yaml", line '),
            ("", ["--out", __file__], "is a file; name a folder"),
            ("", ["--compute.dtype", "float16"], "compute.dtype"),
            ("", ["--steps", "0"], "steps is 0; it must be at least 1."),
            ("", ["--data.length", "1"], "data.length is 1; it must be at least 2."),
        ],
    )
    def test_what_is_wrong_is_named(self, work, tmp_path, capsys, extra, arguments, message):
        path = self.yaml(work, tmp_path, extra)
        assert main(["sft", "--config", path, *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("race-jax sft: ") and said.count("\n") == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", files_of("sft"), ids=lambda path: path.stem)
def test_every_file_of_settings_is_whole(path, monkeypatch):
    check_whole("sft", path, monkeypatch)


@pytest.mark.parametrize(
    ("env", "rate", "batch"),
    [
        ("scienceworld", 1e-5, 32),
        ("webshop", 1e-5, 32),
        ("appworld", 5e-6, 8),
        ("deepsearch", 1e-5, 32),
    ],
)
@pytest.mark.parametrize("size", ["2b", "4b", "9b"])
def test_the_papers_settings(env, rate, batch, size, monkeypatch):
    config = parsed("sft", f"sft_{env}_{size}.yaml", monkeypatch)
    assert (config.optimizer.lr, config.data.batch_size) == (rate, batch)
    assert (config.data.length, config.data.epsilon) == (65536, 0.001)
    assert (config.data.reasoning, config.data.success) == ("cover", "required")
    assert config.model == f"Qwen3.5-{size.upper()}"
