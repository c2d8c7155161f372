from typing import get_args

import pytest
from config_samples import check_whole, files_of, parsed

from race_jax.carl.advantages import Credit
from race_jax.train.carl_config import CreditRule


@pytest.mark.parametrize("path", files_of("carl"), ids=lambda path: path.stem)
def test_every_file_of_settings_is_whole(path, monkeypatch):
    check_whole("carl", path, monkeypatch)


@pytest.mark.parametrize(
    ("model", "batch", "rate"),
    [("qwen2_5_3b", 128, 5e-6), ("qwen2_5_7b", 128, 5e-6), ("qwen3_4b", 64, 1e-5)],
)
@pytest.mark.parametrize(("kind", "first"), [("carl", 8), ("carl_lite", 1)])
def test_the_papers_settings(kind, first, model, batch, rate, monkeypatch):
    config = parsed("carl", f"{kind}_deepsearch_{model}.yaml", monkeypatch)
    assert (config.tree.first, config.tree.forks, config.tree.rule) == (first, 16, "density")
    assert (config.prompts, config.optimizer.lr, config.steps) == (batch, rate, 100)
    assert (config.credit, config.baseline, config.loss.closure) == ("carl", "mean", 0.0)
    assert config.rollout.max_turns == 10 and not config.logic.enabled
    assert config.env.settings["reward"] == "f1" and config.env.settings["format_reward"]


def test_the_names_of_credit_are_those_of_the_rules():
    assert set(get_args(CreditRule)) == {rule.value for rule in Credit}
