import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import sft_samples
from rl_samples import QUIET, config_of, judge_anew, state_of, told

from race_jax.rl_data import RowStats
from race_jax.rollout.results import read_rollouts
from race_jax.train import policy as loop
from race_jax.train import rl_setup
from race_jax.train.cli import main
from race_jax.train.policy import update_numbers
from race_jax.train.rl import rl
from race_jax.train.rl_config import PolicyLossConfig
from race_jax.train.samplers import SamplerConfig
from race_jax.train.step import ComputeConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sft_samples.make_checkpoint(tmp_path_factory.mktemp("rl") / "model")


@pytest.fixture(scope="module", autouse=True)
def outcomes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "read_rollouts", judge_anew)
        yield


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    config = config_of(model, tmp_path_factory.mktemp("whole") / "run")
    assert rl(config, console=QUIET) == 0
    return config


def test_a_run_in_three_parts_is_the_run_in_one_bit_for_bit(whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "parts"))
    for until in (1, 2, None):
        assert rl(config, console=QUIET, until=until) == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(config), state_of(whole))
    assert told(config) == told(whole)
    assert [r["step"] for r in told(whole)] == [1, 2, 3]


def test_every_step_keeps_its_rollouts(whole):
    for step in (1, 2, 3):
        rollouts = list(read_rollouts(f"{whole.out}/rollouts/step_{step:06}.jsonl"))
        assert len(rollouts) == 6
        assert len({r.task for r in rollouts}) == 2
    assert all(r.stop in ("max_turns", "invalid_calls") for r in rollouts)
    first, second = (
        {r.task for r in read_rollouts(f"{whole.out}/rollouts/step_{n:06}.jsonl")} for n in (1, 2)
    )
    assert first != second


def test_rollouts_of_a_lost_step_by_the_same_policy_are_used_again(whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "run"))
    rl(config, console=QUIET, until=1)
    path = Path(config.out) / "rollouts" / "step_000002.jsonl"
    lines = (Path(whole.out) / "rollouts" / "step_000002.jsonl").read_bytes().splitlines(True)
    path.write_bytes(b"".join(lines[:2]))
    rl(config, console=QUIET, until=2)
    assert path.read_bytes().splitlines(True)[:2] == lines[:2]
    assert told(config) == told(whole)[:2]
    # Those of another policy are not.
    other = json.loads(lines[0])
    other["rollout"]["settings"] = "0" * 12
    path = Path(config.out) / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(other) + "\n")
    rl(config, console=QUIET)
    jax.tree.map(np.testing.assert_array_equal, state_of(config), state_of(whole))


def test_updates_teach_close_and_mask(whole):
    records = told(whole)
    assert all(r["train/grad_norm"] > 0 and r["train/skipped"] == 0 for r in records)
    assert all(r["rl/ratio"] == pytest.approx(1, abs=1e-5) for r in records)
    assert all(0 < r["rl/mismatch"] < 1e-5 for r in records)
    assert any(r["rl/masked"] > 0 and r["rl/closings_per_turn"] > 0 for r in records)
    for r in records:
        assert (
            (r["rl/closings_per_turn"] > 0) == (r["rl/extra_tokens"] > 0) == ("rl/close_nats" in r)
        )


def test_two_updates_with_old_log_probabilities_recomputed_at_another_temperature(whole, tmp_path):
    sampling = dataclasses.replace(whole.rollout.sampling, temperature=0.7)
    config = dataclasses.replace(
        whole,
        out=str(tmp_path / "run"),
        steps=1,
        rollout=dataclasses.replace(whole.rollout, sampling=sampling),
        loss=PolicyLossConfig(old_logprobs="recomputed", importance_limit=2.0),
        epochs=2,
    )
    rl(config, console=QUIET)
    (record,) = told(config)
    # At temperature 0.7 on one side alone the two would differ by tenths of a nat.
    assert 0 < record["rl/mismatch"] < 1e-5
    # The last update's ratio is to the policy that sampled, not to the one before it.
    assert abs(record["rl/ratio"] - 1) > 1e-4
    assert int(state_of(config).step) == 2


def test_a_limit_on_the_closure_gradient_that_binds_nothing_changes_nothing(whole, tmp_path):
    loss = dataclasses.replace(whole.loss, closure_clip=1e6)
    config = dataclasses.replace(whole, out=str(tmp_path / "run"), loss=loss)
    rl(config, console=QUIET, until=1)
    (record,) = told(config)
    first = told(whole)[0]
    assert record.pop("rl/closure_grad_norm") > 0
    assert first["rl/closings_per_turn"] > 0
    assert record == pytest.approx(first, rel=1e-4, abs=1e-6)


def test_other_settings_are_refused_by_name(whole):
    other = dataclasses.replace(whole, group=4, loss=PolicyLossConfig(closure=0.1))
    with pytest.raises(ValueError, match=r"loss\.closure was 0\.5 .*; group was 3 and is now 4"):
        rl(other, console=QUIET)


def test_an_environment_that_fails_always_ends_the_run_with_its_checkpoint(whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "run"))
    rl(config, console=QUIET, until=1)
    broken = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, episode_timeout=1e-9)
    )
    assert rl(broken, console=QUIET) == 1
    assert int(state_of(config).step) == 1
    assert rl(config, console=QUIET) == 0
    assert told(config)[-1]["step"] == 3


def test_sigterm_saves_and_ends_well(model, tmp_path):
    config = config_of(model, tmp_path / "run", steps=100_000)
    settings = tmp_path / "run.yaml"
    settings.write_text(json.dumps(dataclasses.asdict(config)))
    child = subprocess.Popen(
        [sys.executable, "-m", "race_jax.train.cli", "rl", "--config", str(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert child.poll() is None, child.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    records = told(config)
    assert int(state_of(config).step) == len(records)
    assert f"{len(records)} of 100000 steps done".encode() in output


def test_a_run_that_is_killed_within_a_step_ends_with_the_same_numbers(whole, tmp_path):
    config = dataclasses.replace(whole, out=str(tmp_path / "run"), save_every=1)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rl_samples\n"
        "from race_jax.train import policy; policy.read_rollouts = rl_samples.judge_anew\n"
        "policy_run = rl_samples.config_of(*sys.argv[2:4], save_every=1)\n"
        "from race_jax.train.rl import rl; rl(policy_run)"
    )
    folder = Path(__file__).resolve().parents[1]
    args = [sys.executable, "-c", script, folder, config.model, config.out]
    child = subprocess.Popen([str(a) for a in args], env={**os.environ, "JAX_PLATFORMS": "cpu"})
    path = tmp_path / "run" / "rollouts" / "step_000002.jsonl"
    end = time.monotonic() + 240
    while not (path.exists() and path.read_bytes().count(b"\n") >= 1):
        assert child.poll() is None
        assert time.monotonic() < end, "the second step never began"
        time.sleep(0.005)
    child.kill()
    child.wait()
    assert rl(config, console=QUIET) == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(config), state_of(whole))
    assert told(config) == told(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "group is 1; an advantage compares"),
        ({"prompts": 0}, "prompts is 0; it must be at least 1"),
        ({"sampler": SamplerConfig("vllm", "http://x")}, "sampler.kind is vllm"),
        ({"compute": ComputeConfig(micro_batches=2)}, "compute.micro_batches is 2; leave it at 1"),
        ({"seed": -1}, "seed is -1"),
        ({"in_flight": 0}, "in_flight is 0"),
    ],
)
def test_settings_out_of_range_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(model, "unused", **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("closure", -0.1),
        ("closure", float("nan")),
        ("clip_low", 1.5),
        ("clip_high", -1.0),
        ("closure_warmup", 2.0),
        ("closure_clip", 0.0),
        ("adaptthink", -0.05),
        ("old_logprobs", "guessed"),
        ("importance_limit", 2.0),
    ],
)
def test_a_loss_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"loss\.{field} is .*; it must be"):
        PolicyLossConfig(**{field: value})


def test_temperature_nought_and_rows_beyond_the_context_are_refused(model, tmp_path):
    config = config_of(model, tmp_path / "run")
    sampling = dataclasses.replace(config.rollout.sampling, temperature=0.0)
    with pytest.raises(ValueError, match="temperature is 0"):
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, sampling=sampling))
    with pytest.raises(ValueError, match="a row has 2000 tokens, and the model's context has 1024"):
        rl(dataclasses.replace(config, length=2000), console=QUIET)
    assert not (tmp_path / "run").exists()


def test_lambda_rises_over_its_warm_up(model):
    config = config_of(model, "unused", steps=10)
    run = rl_setup.Run(config)
    assert [run.closure_at(n) for n in (0, 9)] == [0.5, 0.5]
    loss = PolicyLossConfig(closure=0.4, closure_warmup=0.4)
    run = rl_setup.Run(dataclasses.replace(config, loss=loss))
    assert [run.closure_at(n) for n in range(6)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_numbers_of_an_update_by_hand():
    names = ("loss", "grad_norm", "skipped", "policy", "kept", "ratio", "clipped", "surprisal")
    sums = dict(zip(names, (0.5, 2.0, 0, 10, 8, 8.8, 2, 5.0), strict=True))
    stats = RowStats(policy=10, masked=2, turns=4, closings=1, sampled=20, extra=5, padding=15)
    got = update_numbers({**sums, "close_nats": 3.0, "closings": 1}, stats)
    by_hand = {
        "rl/ratio": 1.1,
        "rl/clipped": 0.25,
        "rl/entropy": 0.5,
        "rl/masked": 0.2,
        "rl/closings_per_turn": 0.25,
        "rl/extra_tokens": 0.25,
        "rl/filled": 0.625,
        "rl/close_nats": 3.0,
    }
    assert {k: got[k] for k in by_hand} == pytest.approx(by_hand)
    assert "rl/close_nats" not in update_numbers({**sums, "close_nats": 0, "closings": 0}, stats)


def test_the_command_is_there(capsys):
    assert main(["rl", "--help"]) == 0
    assert "--loss.closure" in capsys.readouterr().out
