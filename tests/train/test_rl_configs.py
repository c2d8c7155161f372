import pytest
from config_samples import CONFIGS, check_whole, files_of, parsed


@pytest.mark.parametrize("path", files_of("rl"), ids=lambda path: path.stem)
def test_every_file_of_settings_is_whole(path, monkeypatch):
    check_whole("rl", path, monkeypatch)


@pytest.mark.parametrize("env", ["scienceworld", "webshop", "appworld", "deepsearch"])
@pytest.mark.parametrize("size", ["2b", "4b", "9b"])
def test_the_papers_settings(env, size, monkeypatch):
    config = parsed("rl", f"rl_{env}_{size}.yaml", monkeypatch)
    loss, rollout = config.loss, config.rollout
    assert (config.prompts, config.group, config.epochs) == (16, 8, 1)
    assert config.optimizer.lr == 1e-6
    assert (loss.clip_low, loss.clip_high, loss.reduction) == (0.2, 0.2, "token-mean")
    assert loss.closure == (0.01 if env == "deepsearch" else 0.02)
    assert (loss.masking, loss.normalize_std, config.logic.enabled) == (True, True, True)
    assert (config.logic.epsilon, config.logic.dtype) == (0.001, "float32")
    assert (rollout.max_turns, rollout.max_tokens) == (30, 65536)
    assert (rollout.sampling.temperature, rollout.sampling.top_p) == (1.0, 1.0)
    assert rollout.calls_per_turn == ("several" if env == "appworld" else "one")
    assert config.model == f"runs/sft_{env}_{size}/model"
    assert config.env.name == ("search" if env == "deepsearch" else env)


ARMS = {
    "plain GRPO": (["--logic.enabled", "false"], {}),
    "no masking": (["--loss.masking", "false"], {"masking": False}),
    "no closure": (["--loss.closure", "0"], {"closure": 0.0}),
    "AdaptThink": (
        ["--logic.enabled", "false", "--loss.adaptthink", "0.05"],
        {"adaptthink": 0.05},
    ),
}


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_flag_or_two_and_the_guide_says_so(arm, monkeypatch):
    flags, loss = ARMS[arm]
    config = parsed("rl", "rl_potions.yaml", monkeypatch, *flags)
    assert config.logic.enabled == ("--logic.enabled" not in flags)
    for field, value in loss.items():
        assert getattr(config.loss, field) == value
    guide = (CONFIGS.parent / "docs" / "rl.md").read_text()
    assert f"`{' '.join(flags)}`" in guide
