import dataclasses
import json
from pathlib import Path

import pytest
from rollout_samples import completion, word_renderer

from race_jax.envs.potions import PotionShop, PotionShopConfig
from race_jax.rollout.protocol import Request
from race_jax.rollout.results import Rollout, RolloutFile, read_rollouts
from race_jax.train import cli, reproduce_arms, story
from race_jax.train.reproduce import cells, reproduce
from race_jax.train.reproduce_arms import ARMS, ReproduceConfig
from race_jax.train.reproduce_forced import FORCED, ForcedSampler
from race_jax.train.reproduce_results import Spread
from race_jax.train.tiny import TinyTraining


def small(out, **changes):
    given = {
        "out": str(out),
        "seeds": (0,),
        "world": PotionShopConfig(4),
        "training": TinyTraining(1, steps=2, rounds=0),
        "episodes": 6,
        "held_out": 3,
        "epsilon": 0.1,
        "thresholds": (0.1, 0.3),
        "sft_steps": 1,
        "rl_steps": 1,
        "prompts": 1,
        "group": 2,
        "tasks": 4,
    }
    return ReproduceConfig(**given | changes)


def test_an_arm_of_rl_from_nothing_to_its_line_in_the_table(tmp_path, capsys):
    config = small(tmp_path / "r", arms=("no_closure",))
    assert reproduce(config) == 0
    found = json.loads((tmp_path / "r" / "results.json").read_text())
    assert [line["name"] for line in found["arms"]] == [
        "RACE-SFT, half-covered",
        "RACE-SFT-RL, no closure",
    ]
    run = tmp_path / "r" / "seed_0" / "no_closure"
    settings = json.loads((run / "settings.json").read_text())
    assert settings["loss"]["closure"] == 0 and settings["logic"]["enabled"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    rollouts = list(read_rollouts(tmp_path / "r" / "seed_0" / "evaluations" / "no_closure.jsonl"))
    assert len(rollouts) == 4
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rl", "sft", "evaluate_as", "logic", "_train"):
            patch.setattr(story, name, None)
        assert reproduce(config) == 0
    assert capsys.readouterr().out.count("[4/4] seed 0: RACE-SFT-RL, no closure") == 2


@pytest.fixture
def quick(monkeypatch):
    """Runs in which nothing is trained; says which runs were asked for, and what they solved."""
    asked, solved = {}, {}

    def run(work, title, config):
        asked[title] = config

    def covers(work, title, epsilon):
        with open(work["covers.jsonl"], "w") as file:
            for item in story.trajectories(work["held_out.jsonl"]):
                for value in map(float, epsilon.split(",")):
                    turns = [
                        {"decision": "THINK" if need else "SKIP", "tested": t > 0}
                        | {"reasoning_tokens": 5}
                        for t, need in enumerate(item.extra["needed"])
                    ]
                    record = {"id": item.id, "epsilon": value, "turns": turns}
                    file.write(json.dumps(record) + "\n")
        return 0

    def play(work, title, config, which=""):
        name = Path(config.out).stem
        seed = int(work.path.name.removeprefix("seed_"))
        wins = solved.get((name, seed), 2)
        Path(config.out).parent.mkdir(exist_ok=True)
        with RolloutFile(config.out, {}) as file:
            for n in range(4):
                won = n < wins
                file.append(
                    Rollout(
                        f"potions/{n}/0", "potions", str(n), 0, (), (), float(won), won, "done",
                        None, None, (),
                    )
                )  # fmt: skip

    monkeypatch.setattr(story, "train_model", lambda *_: None)
    monkeypatch.setattr(story, "find_covers", covers)
    monkeypatch.setattr(story, "fine_tune", run)
    monkeypatch.setattr(story, "reinforce", run)
    monkeypatch.setattr(story, "play", play)
    monkeypatch.setattr(reproduce_arms, "play_forced", play)
    return asked, solved


def test_every_arm_and_threshold_of_every_seed_stands_in_the_tables(quick, tmp_path, capsys):
    _, solved = quick
    solved |= {("race_sft_rl", 0): 4, ("race_sft_rl", 1): 3, ("forced_all", 0): 0}
    assert reproduce(small(tmp_path / "r", seeds=(0, 1))) == 0
    found = json.loads((tmp_path / "r" / "results.json").read_text())
    assert [line["name"] for line in found["arms"]] == [arm.name for arm in ARMS]
    lines = {line["name"]: line for line in found["arms"]}
    # 4 of 4 and 3 of 4: mean 0.875, deviation sqrt(2 * 0.125^2 / 1).
    assert lines["RACE-SFT-RL"]["success"]["mean"] == 0.875
    assert lines["RACE-SFT-RL"]["success"]["deviation"] == pytest.approx(0.125 * 2**0.5)
    assert lines["SFT"]["success"] == {"mean": 0.5, "deviation": 0.0}
    assert lines["SFT"]["paper"]["WebShop"] == [44.6, 1375]
    assert [line["success"]["mean"] for line in found["forced"]] == [0.5, 0.5, 0.25]
    assert [point["epsilon"] for point in found["thresholds"]] == [0.1, 0.3]
    logic = found["thresholds"][0]["logic"]
    assert len(logic) == 2 and all(c["recall"] == c["precision"] == 1 for c in logic)
    text = (tmp_path / "r" / "results.md").read_text()
    assert "| RACE-SFT-RL | 87.5 ± 17.7 |" in text and "73.3 / 1,403" in text
    for name in ("results.png", "thresholds.png"):
        assert (tmp_path / "r" / name).read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "[38/38] seed 1" in said and "ScienceWorld" in said


def test_each_arm_asks_for_what_it_is(quick, tmp_path):
    asked, _ = quick
    reproduce(small(tmp_path / "r"))
    seed = tmp_path / "r" / "seed_0"

    def kind(name):
        run = asked[name]
        loss = run.loss
        start = str(Path(run.model).relative_to(seed))
        return start, run.logic.enabled, loss.masking, loss.closure, loss.adaptthink

    covered = "half_covered/model"
    assert {name: kind(name) for name in asked if hasattr(asked[name], "logic")} == {
        "sft_grpo": ("model", False, True, 0.02, 0.0),
        "race_sft_grpo": (covered, False, True, 0.02, 0.0),
        "no_masking": (covered, True, False, 0.02, 0.0),
        "no_closure": (covered, True, True, 0.0, 0.0),
        "adaptthink": (covered, False, True, 0.02, 0.05),
        "race_sft_rl": (covered, True, True, 0.02, 0.0),
    }
    supervised = {name: run.data for name, run in asked.items() if hasattr(run, "data")}
    assert {name: (data.reasoning, data.epsilon) for name, data in supervised.items()} == {
        "sft_further": ("full", None),
        "direct": ("none", None),
        "race_sft": ("cover", 0.1),
        "half_covered": ("full", None),
        "epsilon_0.3": ("cover", 0.3),
    }


def test_the_half_covered_start_sees_each_trajectory_with_and_without(quick, tmp_path):
    asked, _ = quick
    reproduce(small(tmp_path / "r"))
    items = list(story.trajectories(asked["half_covered"].data.path))
    for full, cover in zip(items[::2], items[1::2], strict=True):
        assert full.id.removesuffix("/full") == cover.id.removesuffix("/cover")
        needed = full.extra["needed"]
        told = [
            [bool(m["reasoning_content"]) for m in item.messages if m["role"] == "assistant"]
            for item in (full, cover)
        ]
        assert told == [[True] * len(needed), needed]


def test_an_arm_that_fails_costs_that_arm_alone(quick, tmp_path, monkeypatch, capsys):
    def fail(work, title, config):
        if title == "no_closure":
            raise FloatingPointError("nothing finite")

    monkeypatch.setattr(story, "reinforce", fail)
    assert reproduce(small(tmp_path / "r")) == 1
    said = capsys.readouterr().out
    assert "seed 0: RACE-SFT-RL, no closure failed: nothing finite" in said
    found = json.loads((tmp_path / "r" / "results.json").read_text())
    means = {line["name"]: line["success"]["mean"] for line in found["arms"]}
    assert means.pop("RACE-SFT-RL, no closure") is None
    assert set(means.values()) == {0.5}
    monkeypatch.setattr(story, "find_covers", lambda *_: 2)
    with pytest.raises(ValueError, match="seed 0: LoGiC ended with 2"):
        reproduce(small(tmp_path / "r"))


def test_only_what_an_arm_starts_from_is_run_with_it():
    config = ReproduceConfig(arms=("no_closure",))
    assert [arm.folder for arm in config.chosen] == ["half_covered", "no_closure"]
    assert [cell.name for cell in cells(config, 0)][2:] == [arm.name for arm in config.chosen]
    starts = {arm.folder: arm.start for arm in ARMS}
    folders = list(starts)
    for n, arm in enumerate(ARMS):
        if arm.start is not None:
            assert arm.start.removesuffix("/model") in folders[:n]


def test_forced_turns_are_those_that_the_world_says():
    renderer = word_renderer()
    shop = PotionShop()
    messages = [
        {"role": "system", "content": shop.system},
        {"role": "user", "content": shop.reset("3")},
    ]
    context = tuple(renderer.prompt_ids(messages, shop.tools))
    samplers = {which: ForcedSampler(Echo(), renderer, which) for which in FORCED}
    done = False
    turns = 0
    while not done:
        _, name, arguments, needed = shop.oracle()
        assert samplers["needed"].forces(context) == needed
        assert samplers["redundant"].forces(context) == (not needed)
        assert samplers["all"].forces(context)
        said, _, done, _ = shop.step({"name": name, "arguments": arguments})
        context += tuple(renderer.observation_ids([{"role": "tool", "content": said}]))
        turns += 1
    assert turns in (8, 10)


class Echo:
    context_length = 99

    def __init__(self):
        self.requests = []

    def submit(self, request):
        self.requests.append(request)

    def poll(self, timeout=None):
        return [completion(self.requests[-1], (7, 8), "length")]


def test_a_forced_block_stands_in_prompt_and_completion():
    renderer, inner = word_renderer(), Echo()
    sampler = ForcedSampler(inner, renderer, "needed")
    opening = [{"role": "user", "content": "Facts:\nOrder: p1"}]
    prompt = tuple(renderer.prompt_ids(opening, ()))
    sampler.submit(Request("a", prompt, 5, (9,), 0))
    assert inner.requests[0].prompt == prompt + tuple(renderer.skip_ids)
    (whole,) = sampler.poll()
    assert whole.tokens == (*renderer.skip_ids, 7, 8)
    assert len(whole.logprobs) == len(whole.tokens) and whole.logprobs[0] == 0
    told = renderer.observation_ids([{"role": "tool", "content": "You took h1 for p1"}])
    later = prompt + whole.tokens + tuple(told)
    sampler.submit(Request("a", later, 5, (9,), 0))
    assert inner.requests[1].prompt == later
    assert sampler.poll()[0].tokens == (7, 8)
    with pytest.raises(ValueError, match="there are no 'some' turns"):
        ForcedSampler(inner, renderer, "some")


def test_means_and_spreads_by_hand():
    # 0.1, 0.2, 0.6: mean 0.3; deviations -0.2, -0.1, 0.3: squares 0.14, over 2: 0.07.
    spread = Spread.of([0.1, None, 0.2, 0.6])
    assert (spread.mean, spread.deviation) == (pytest.approx(0.3), pytest.approx(0.07**0.5))
    assert spread.text(100) == "30.0 ± 26.5"
    assert Spread.of([0.5]).text() == "0.5"  # one seed tells nothing of the spread
    assert Spread.of([None]).text() == "-"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "seeds is"),
        ({"seeds": (1, 1)}, "must be different numbers"),
        ({"rl_steps": 0}, "rl_steps is 0; it must be at least 1"),
        ({"thresholds": (0.1, float("nan"))}, "thresholds"),
        ({"epsilon": float("inf")}, "at least 0 and finite"),
        ({"prompts": 0}, "prompts is 0; it must be at least 1"),
        ({"group": 1}, "group is 1; an advantage compares"),
        ({"arms": ("grpo",)}, "arms names 'grpo'; there are base, model"),
    ],
)
def test_settings_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ReproduceConfig(**changes)


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        reproduce(ReproduceConfig(out=str(tmp_path / "x")))


def test_the_command_line_reaches_the_settings(monkeypatch, tmp_path):
    import race_jax.train.reproduce as module

    seen = []

    def fake(config: ReproduceConfig) -> int:
        """Says nothing."""
        seen.append(config)
        return 0

    monkeypatch.setattr(module, "reproduce", fake)
    assert cli.main(["reproduce", "--seeds", "[1,2]", "--world.size", "6", "--rl-steps", "3"]) == 0
    assert (seen[0].seeds, seen[0].world.size, seen[0].rl_steps) == ((1, 2), 6, 3)
    assert dataclasses.replace(seen[0], seeds=(0, 1, 2), world=PotionShopConfig(), rl_steps=12) == (
        ReproduceConfig()
    )
