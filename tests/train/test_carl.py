"""Runs of CARL: trees, updates on forks, files, and going on after a stop."""

import json

import jax
import numpy as np
import pytest
import sft_samples
from rl_samples import QUIET, judge_anew, settings_of, state_of, told

from race_jax.carl.forking import ForkConfig
from race_jax.carl.tree import rebuild
from race_jax.rollout.results import read_rollouts
from race_jax.train import policy
from race_jax.train.carl import carl
from race_jax.train.carl_config import CarlConfig
from race_jax.train.cli import main
from race_jax.train.distributed import MeshConfig
from race_jax.train.optimizer import LoraConfig
from race_jax.train.rl_config import CoverConfig, PolicyLossConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sft_samples.make_checkpoint(tmp_path_factory.mktemp("carl") / "model")


@pytest.fixture(scope="module", autouse=True)
def outcomes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "read_rollouts", judge_anew)
        yield


def config_of(model, out, **changes):
    given = {"steps": 2, "tree": ForkConfig(first=1, forks=4), "rows": 6, **changes}
    return CarlConfig(**settings_of(model, out, **given))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    config = config_of(model, tmp_path_factory.mktemp("carl") / "run")
    assert carl(config, console=QUIET) == 0
    return config


def test_a_run_grows_trees_and_tells_what_they_cost(whole):
    records = told(whole)
    assert [record["step"] for record in records] == [1, 2]
    for step, record in enumerate(records, 1):
        path = f"{whole.out}/rollouts/step_{step:06}.jsonl"
        trees = rebuild(read_rollouts(path))
        assert len(trees) == 2
        assert all(len(tree.rollouts) == 5 for tree in trees.values())
        assert record["carl/rollout_actions"] == sum(tree.edges for tree in trees.values())
        siblings = [n.actions for tree in trees.values() for n in tree.nodes if n.actions > 1]
        assert record["carl/update_actions"] == sum(siblings) <= 2 * 2 * 4
        # Trees of turns without a prefix to share cost no more than whole episodes.
        assert record["carl/rollout_ratio"] <= 1.25
        assert record["rl/mismatch"] < 1e-4
        assert record["carl/diverged"] == 0
        assert record["carl/entropy"] > 0 and record["carl/criticality"] >= 0
        with open(path.replace(".jsonl", ".criticality.json")) as file:
            table = json.load(file)
        counted = sum(row["states"] for row in table["by_turn"].values())
        assert counted == len(siblings) == sum(row["states"] for row in table["by_tool"].values())
    assert records[0]["train/grad_norm"] > 0


def test_a_stopped_run_goes_on_to_the_same_weights(model, whole, tmp_path):
    config = config_of(model, tmp_path / "run")
    carl(config, console=QUIET, until=1)
    assert carl(config, console=QUIET) == 0
    assert told(config) == told(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(config), state_of(whole))


def test_rows_path_by_path_give_the_same_step(model, whole, tmp_path):
    config = config_of(model, tmp_path / "run", share=False)
    carl(config, console=QUIET, until=1)
    one, two = told(config)[0], told(whole)[0]
    for name in ("train/loss", "train/grad_norm", "rl/ratio", "rl/entropy"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-6)
    assert one["train/tokens"] == two["train/tokens"]


def test_adapters_are_trained_on_trees(model, whole, tmp_path):
    config = config_of(model, tmp_path / "run", lora=LoraConfig(rank=2))
    carl(config, console=QUIET, until=1)
    # Adapters begin as nothing, so the first step's episodes and loss are those of full training.
    one, two = told(config)[0], told(whole)[0]
    assert one["carl/update_actions"] == two["carl/update_actions"]
    np.testing.assert_allclose(one["train/loss"], two["train/loss"], rtol=1e-4, atol=1e-6)
    assert one["train/grad_norm"] > 0
    sizes = [sum(x.size for x in jax.tree.leaves(state_of(c).trained)) for c in (config, whole)]
    assert sizes[0] < sizes[1] / 2
    # The next step's episodes are drawn by the adapted policy.
    assert carl(config, console=QUIET) == 0
    assert told(config)[1]["rl/mismatch"] < 1e-4


def test_race_and_carl_together_mask_and_close(model, tmp_path):
    config = config_of(
        model,
        tmp_path / "run",
        steps=1,
        logic=CoverConfig(epsilon=5.0, slots=2, rows=2),
        loss=PolicyLossConfig(closure=0.5),
    )
    assert carl(config, console=QUIET) == 0
    (record,) = told(config)
    assert record["rl/cover_skips"] > 0
    assert record["rl/closings_per_turn"] > 0 and record["rl/close_nats"] > 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"baseline": "leave_one_out", "credit": "treerl"}, "a baseline of its own"),
        ({"loss": PolicyLossConfig()}, "closure is 0.02 without covers"),
        (
            {"loss": PolicyLossConfig(closure=0.0, reduction="seq-mean-token-mean")},
            "mean over the tokens",
        ),
        ({"loss": PolicyLossConfig(closure=0.0, adaptthink=0.1)}, "adaptthink is 0.1"),
        ({"mesh": MeshConfig(context=2)}, "cannot be cut"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, changes, rule):
    with pytest.raises(ValueError, match=rule):
        config_of("model", tmp_path, **changes)


def test_the_command_refuses_a_tree_without_episodes(capsys):
    code = main(["carl", "--model", "m", "--out", "o", "--steps", "1", "--tree.first", "0"])
    assert code == 2
    assert "tree.first is 0; it must be at least 1" in capsys.readouterr().err
