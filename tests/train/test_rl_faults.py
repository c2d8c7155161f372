import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sft_samples
from rl_samples import QUIET, config_of, judge_anew, told

from race_jax.closure_guard import GuardConfig
from race_jax.envs import potions
from race_jax.envs.potions import PotionShop
from race_jax.rl_data import sampled_logprobs
from race_jax.rollout.episode import Episode
from race_jax.rollout.results import read_rollouts
from race_jax.toolcalls import ParsedCall
from race_jax.train import policy as loop
from race_jax.train import rl as rl_module
from race_jax.train import rl_watch
from race_jax.train.rl import rl
from race_jax.train.rl_config import PolicyLossConfig
from race_jax.turns import ParsedTurn

GO = ParsedTurn("", "", (ParsedCall("call_1", "go", {"room": "r1"}, ""),), None, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sft_samples.make_checkpoint(tmp_path_factory.mktemp("rl") / "model")


def test_a_checkpoint_of_another_model_is_refused(model, tmp_path):
    config = config_of(model, tmp_path / "run", steps=2)
    rl(config, console=QUIET, until=1)
    other = sft_samples.make_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(
        ValueError, match=r"other settings: model was '.*/model' and is now '.*/other'"
    ):
        rl(dataclasses.replace(config, model=str(other)), console=QUIET)


def test_more_prompts_than_tasks_and_a_wrong_split_are_refused(model, tmp_path):
    config = config_of(model, tmp_path / "run", prompts=10**6)
    with pytest.raises(ValueError, match=r"a step takes 1000000 tasks, but there are .* prompts"):
        rl(config, console=QUIET)
    with pytest.raises(ValueError, match="there is no split 'training'"):
        rl(dataclasses.replace(config, split="training"), console=QUIET)
    assert not (tmp_path / "run").exists()


def test_rows_that_the_mesh_does_not_divide_are_refused(model, tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rl_samples\n"
        "from race_jax.train.distributed import MeshConfig\n"
        "config = rl_samples.config_of(*sys.argv[2:4], rows=12, mesh=MeshConfig(data=8))\n"
        "try:\n    rl_samples.rl_setup.prepare(config)\n"
        "except ValueError as error:\n    print(error)"
    )
    args = [sys.executable, "-c", script, Path(__file__).resolve().parents[1], model]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    said = subprocess.run(
        [*map(str, args), str(tmp_path / "run")],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "a micro-batch, rows x length" in said and "12" in said and "8" in said, said
    assert not (tmp_path / "run").exists()


def test_a_guard_lowers_an_absurd_lambda_in_the_next_step_over_a_resume_too(
    model, tmp_path, monkeypatch, capsys
):
    def all_kept(rollout, tokens, advantage, removed):
        return rl_module.Judged(tokens, sampled_logprobs(rollout), advantage, (), tokens.reasoned)

    monkeypatch.setattr(rl_module, "judged", all_kept)
    monkeypatch.setattr(loop, "read_rollouts", judge_anew)
    guard = GuardConfig(limit=1e-9, least=1, backoff=0.25)
    loss = PolicyLossConfig(closure=100.0)
    config = config_of(model, tmp_path / "run", steps=2, loss=loss, guard=guard)
    for until in (1, None):
        rl(config, until=until)
    assert [record["rl/closure"] for record in told(config)] == [100, 25]
    assert told(config)[0]["rl/kept_turns"] >= 1 and told(config)[0]["rl/close_at_kept"] > 1e-9
    assert capsys.readouterr().out.count("lambda is multiplied by 0.25 from here on") == 1


class Unjust(PotionShop):
    """A world whose reward function has a fault, once a call was carried out in it."""

    fault = "raises"

    def step(self, call):
        if self.fault == "raises":
            raise ZeroDivisionError("no points to share")
        return super().step(call)._replace(reward={"nan": math.nan, "none": None}[self.fault])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "ZeroDivisionError: no points to share"),
        ("nan", "the reward is nan; it must be a finite number"),
        ("none", "the reward is None; it must be a finite number"),
    ],
)
def test_rewards_at_fault_end_the_run_with_their_cause_and_keep_the_rollouts(
    model, tmp_path, monkeypatch, capsys, fault, said
):
    monkeypatch.setattr(potions, "PotionShop", Unjust)
    monkeypatch.setattr(Unjust, "fault", fault)
    # Whatever was sampled, the environment is called.
    monkeypatch.setattr(Episode, "_parse", lambda *_: GO)
    config = config_of(model, tmp_path / "run")
    limits = dataclasses.replace(config.rollout, max_faults=3)
    assert rl(dataclasses.replace(config, rollout=limits)) == 1
    out = capsys.readouterr().out
    assert "3 episodes failed in a row" in out and said in out
    assert "0 of 3 steps done" in out
    kept = list(read_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl"))
    assert len(kept) >= 3 and all(r.stop == "env_error" for r in kept)


def test_an_environment_that_never_succeeds_is_told_of(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rl_watch, "BARREN", 2)
    config = config_of(model, tmp_path / "run", steps=2, save_every=1)
    for until in (1, None):  # counted over a resume
        rl(config, until=until)
    out = capsys.readouterr().out
    assert out.count("no episode has succeeded for 2 steps") == 1
    assert "turns are cut off (raise rollout.max_turn_tokens)" in out


def test_a_start_that_never_closes_is_refused_and_its_rollouts_are_kept(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(rl_watch, "TURNS", 6)
    monkeypatch.setattr(loop, "read_rollouts", never_closing)
    config = config_of(model, tmp_path / "run")
    with pytest.raises(ValueError, match=r"never closes a block at once.*cover SFT comes first"):
        rl(config, console=QUIET)
    assert len(list(read_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl"))) == 6


def never_closing(path):
    for rollout in read_rollouts(path):
        notes = (dataclasses.replace(note, reasoning_tokens=9) for note in rollout.notes)
        yield dataclasses.replace(rollout, notes=tuple(notes))
