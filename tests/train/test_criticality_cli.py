"""Criticality of states: a model's, going on after a stop, and of trees that a run has left."""

import json

import pytest
import sft_samples
from carl_samples import grow

from race_jax.carl.criticality import resampled_states
from race_jax.envs.factory import EnvironmentConfig
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.protocol import SamplingConfig
from race_jax.rollout.results import RolloutFile, read_rollouts
from race_jax.train.cli import main
from race_jax.train.criticality_cli import CriticalityConfig, carl_criticality
from race_jax.train.samplers import SamplerConfig


def config_of(model, out, **changes):
    given = {
        "model": str(model),
        "out": str(out),
        "env": EnvironmentConfig("potions", {"size": 4, "orders": 1}),
        "count": 2,
        "actions": 2,
        "states": 2,
        "rollout": RolloutConfig(max_turns=3, max_turn_tokens=24, max_tokens=320),
        "sampler": SamplerConfig(slots=4, chunk=64),
        **changes,
    }
    return CriticalityConfig(**given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criticality")
    config = config_of(sft_samples.make_checkpoint(folder / "model"), folder / "states.jsonl")
    assert carl_criticality(config) == 0
    return config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_is_judged_state_by_state(whole, tmp_path):
    rollouts = list(read_rollouts(whole.out))
    assert sum(r.sample == 0 for r in rollouts) == 2
    assert len(rollouts) == 2 + 2 * 2 * 2
    path = type(tmp_path)(whole.out)
    states = lines(path.with_suffix(".states.jsonl"))
    assert len(states) == 4 and all(s["actions"] == 2 for s in states)
    assert all(s["entropy"] > 0 for s in states)
    summary = json.loads(path.with_suffix(".summary.json").read_text())
    assert summary["states"] == 4
    assert sum(row["states"] for row in summary["by_turn"].values()) == 4
    assert path.with_suffix(".png").stat().st_size > 1000


def test_a_stopped_analysis_plays_only_what_is_left(whole, tmp_path):
    rollouts = list(read_rollouts(whole.out))
    config = config_of(whole.model, tmp_path / "states.jsonl")
    with RolloutFile(config.out, config.deciding(config.model)) as file:
        for rollout in rollouts[:5]:
            file.append(rollout)
    assert carl_criticality(config) == 0
    again = {r.id: r for r in read_rollouts(config.out)}
    assert again.keys() == {r.id for r in rollouts}
    assert all(again[r.id].tokens == r.tokens for r in rollouts)
    # Forwarding a prefix anew moves log-probs by rounding.
    pairs = zip(resampled_states(again.values(), 2), resampled_states(rollouts, 2), strict=True)
    for one, two in pairs:
        assert one._replace(entropy=0) == two._replace(entropy=0)
        assert one.entropy == pytest.approx(two.entropy, abs=1e-5)


def test_other_settings_are_refused(whole, capsys):
    with pytest.raises(ValueError, match=r"other settings.*actions"):
        carl_criticality(config_of(whole.model, whole.out, actions=3))


def test_trees_of_a_run_need_no_model(tmp_path, capsys):
    path = tmp_path / "step_000001.jsonl"
    rollouts = grow()[0]
    with RolloutFile(path, {}) as file:
        for rollout in rollouts:
            file.append(rollout)
    out = tmp_path / "told.jsonl"
    assert main(["carl-criticality", "--rollouts", str(path), "--out", str(out)]) == 0
    assert "Cliff's delta" in capsys.readouterr().out
    states = lines(tmp_path / "told.states.jsonl")
    assert states and not out.exists()
    alone = tmp_path / "alone.jsonl"
    with RolloutFile(alone, {}) as file:
        file.append(rollouts[0])
    with pytest.raises(ValueError, match="no state has two actions"):
        carl_criticality(CriticalityConfig(out=str(out), rollouts=str(alone)))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model": None}, "give a model to play with, or the rollouts"),
        ({"rollouts": "x.jsonl"}, "give a model to play with, or the rollouts"),
        ({"actions": 1}, "actions is 1; it must be at least 2"),
        ({"states": 0}, "states is 0; it must be at least 1"),
        ({"rollout": RolloutConfig(sampling=SamplingConfig(temperature=0.0))}, "temperature is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changes, rule):
    given = {"model": "m", "out": str(tmp_path / "o.jsonl"), **changes}
    with pytest.raises(ValueError, match=rule):
        CriticalityConfig(**given)


def test_outputs_and_inputs_that_are_not_there_are_told(tmp_path, capsys):
    assert main(["carl-criticality", "--model", "m", "--out", str(tmp_path)]) == 2
    assert "must name a file that ends in .jsonl" in capsys.readouterr().err
    told = main(
        ["carl-criticality", "--rollouts", "none.jsonl", "--out", str(tmp_path / "o.jsonl")]
    )
    assert told == 2 and "there is no such file" in capsys.readouterr().err
