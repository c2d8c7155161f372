"""`race-jax evaluate` and `race-jax compare` end to end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from checkpoint_samples import save_tiny
from env_servers import free_port, serving
from rollout_samples import potion_oracle, word_renderer

from race_jax.chat import renderer_for
from race_jax.envs.factory import EnvironmentConfig, make_environment
from race_jax.envs.potions import PotionShop
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.rollout.agents import AgentConfig
from race_jax.rollout.protocol import Request
from race_jax.rollout.results import read_rollouts
from race_jax.tokenizer import load_tokenizer
from race_jax.train.cli import main
from race_jax.train.evaluate_cli import EvaluateConfig
from race_jax.train.playing import spread
from race_jax.train.samplers import SamplerConfig
from race_jax.trajectories import read


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny checkpoint with random weights, in the ordinary format."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def settings(tmp_path, model_dir, name="out", **changes):
    given = {
        "model": model_dir,
        "out": str(tmp_path / f"{name}.jsonl"),
        "env": {"name": "potions"},
        "count": 3,
        "rollout": {"max_turn_tokens": 100, "max_tokens": 1000},
        **changes,
    }
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(given))
    return ["evaluate", "--config", str(path)]


def potion_server(delay=0.0):
    """Answers as vLLM does and plays the potion shop, telling tasks by their text."""
    renderer = word_renderer()
    oracle = potion_oracle(renderer, lambda turn: turn % 2 == 0)
    openings, plays = {}, {}

    def opening(task):
        world = PotionShop()
        told = [
            {"role": "system", "content": world.system},
            {"role": "user", "content": world.reset(task)},
        ]
        return renderer.prompt_ids(told, world.tools)

    def answer(method, route, body):
        if route == "/v1/models":
            return {"data": [{"id": "toy", "max_model_len": 5000}]}
        time.sleep(delay)
        prompt = tuple(body["prompt"])
        if not openings:
            openings.update({task: opening(task) for task in PotionShop().tasks("test")})
        task = next(t for t, ids in openings.items() if prompt[: len(ids)] == ids)
        # The first turn of a task begins it anew.
        turn = 0 if prompt == openings[task] else plays[task] + 1
        plays[task] = turn
        ids = list(oracle(Request(f"potions/{task}/0", (1,), 1, (), 0), turn))
        logprobs = {"token_logprobs": [-0.25] * len(ids)}
        choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        return {"choices": [choice]}

    return answer


def on_server(server):
    return {"kind": "vllm", "address": server.address, "concurrency": 4}


def test_a_random_checkpoint_is_evaluated_here(tmp_path, model_dir, capsys):
    pytest.importorskip("race_jax.models.sampler")
    sampler = {"kind": "local", "slots": 2, "chunk": 64}
    call = settings(tmp_path, model_dir, sampler=sampler, samples=2, rollout={
        "max_turn_tokens": 6, "max_tokens": 900, "max_turns": 4, "max_invalid": 2,
    })  # fmt: skip
    assert main(call) == 0
    rollouts = {r.id: r for r in read_rollouts(tmp_path / "out.jsonl")}
    assert len(rollouts) == 6 and len({r.task for r in rollouts.values()}) == 3
    assert {r.stop for r in rollouts.values()} <= {"invalid_calls", "done", "max_turns"}
    known = len(load_tokenizer(model_dir))
    for r in rollouts.values():
        turn = r.tokens.turns[0]
        assert max(turn.action) < known
        assert all(logprob <= 0 for logprob in r.notes[0].logprobs)
    shown = capsys.readouterr().out
    assert "6 episodes" in shown and "out: " in shown
    before = (tmp_path / "out.jsonl").read_bytes()
    assert main(call) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before
    again = settings(tmp_path, model_dir, "again", sampler={**sampler, "slots": 1}, samples=2,
                     rollout={"max_turn_tokens": 6, "max_tokens": 900, "max_turns": 4,
                              "max_invalid": 2}, in_flight=3)  # fmt: skip
    assert main(again) == 0
    for r in read_rollouts(tmp_path / "again.jsonl"):
        assert (r.tokens, r.stop) == (rollouts[r.id].tokens, rollouts[r.id].stop)


def test_results_of_a_server_are_measured_and_compared(tmp_path, model_dir, capsys):
    with serving(potion_server()) as server:
        for name, count in (("few", 3), ("more", 5)):
            call = settings(tmp_path, model_dir, name, count=count, sampler=on_server(server))
            assert main(call) == 0
    summary = json.loads((tmp_path / "few.summary.json").read_text())
    assert (summary["episodes"], summary["success"], summary["stops"]) == (3, 1.0, {"done": 3})
    turns = [len(r.notes) for r in read_rollouts(tmp_path / "few.jsonl")]
    skipped = sum(count // 2 for count in turns)
    assert summary["skip_ratio"] == pytest.approx(skipped / sum(turns))
    resolved = json.loads((tmp_path / "few.settings.json").read_text())
    assert (resolved["rollout"]["max_turns"], resolved["split"]) == (30, "test")
    assert all(t.success for t in read(tmp_path / "few.jsonl", strict=True))
    capsys.readouterr()
    files = [str(tmp_path / "few.jsonl"), str(tmp_path / "more.jsonl")]
    assert main(["compare", *files, "--plot", str(tmp_path / "plot.png")]) == 0
    shown = capsys.readouterr().out
    assert "few" in shown and "more" in shown and "100.0 %" in shown
    assert "different numbers of tasks" in shown
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert main(["compare", *files, "--plot", files[0]]) == 2
    assert "would replace a result" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["compare", files[0], str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl: it holds no episode yet" in capsys.readouterr().err


def test_a_stopped_evaluation_goes_on(tmp_path, model_dir):
    with serving(potion_server(delay=0.05)) as server:
        sampler = {**on_server(server), "concurrency": 1}
        call = settings(tmp_path, model_dir, count=30, in_flight=1, sampler=sampler)
        command = [sys.executable, "-m", "race_jax.train.cli", *call]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        out = tmp_path / "out.jsonl"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (out.exists() and out.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "the same command goes on from there" in shown
        done = [r.id for r in read_rollouts(out)]
        assert 1 <= len(done) < 30
        faster = settings(tmp_path, model_dir, count=30, in_flight=8, sampler=on_server(server))
        assert main(faster) == 0
    everything = [r.id for r in read_rollouts(out)]
    assert everything[: len(done)] == done and len(set(everything)) == 30 == len(everything)


def test_a_failed_request_is_told_and_the_rest_is_kept(tmp_path, model_dir, capsys):
    with serving(potion_server()) as server:
        server.faults["/v1/completions"] = [lambda handler: handler.reply(400, b'"no"')]
        call = settings(tmp_path, model_dir, sampler=on_server(server))
        assert main(call) == 1
        shown = capsys.readouterr().out
        assert "sampler_error" in shown and "400" in shown
        assert len(list(read_rollouts(tmp_path / "out.jsonl"))) == 3
        # It came to no turn, so it is played now.
        assert main(call) == 0
    assert {r.success for r in read_rollouts(tmp_path / "out.jsonl")} == {True}


FAULTS = [
    ({"env": {"name": "chess"}}, "there is no environment 'chess'"),
    ({"env": {"name": "potions", "settings": {"sizes": 3}}}, "no setting 'sizes'; it has size"),
    ({"env": {"name": "potions", "settings": {"size": 1}}}, "size is 1"),
    ({"env": {"name": "potions", "settings": {"size": "x"}}}, "'potions': Parser key \"size\""),
    ({"env": {"name": "openenv"}}, "'openenv': the following arguments are required: address"),
    ({"split": "exam"}, "there is no split 'exam'"),
    ({"count": 0}, "count is 0"),
    ({"in_flight": 0}, "in_flight is 0"),
    ({"agent": {"kind": "dart", "drafts": 1}}, "drafts is 1"),
    ({"sampler": {"kind": "vllm"}}, "needs the server's"),
    ({"sampler": {"address": "http://127.0.0.1:1"}}, "takes none"),
    ({"out": "here.txt"}, "ends in .jsonl"),
    ({"out": f"{__file__}/out.jsonl"}, "its folder cannot be made"),
    ({"rollout": {"max_turns": 0}}, "max_turns is 0"),
    ({"model": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS)
def test_bad_settings_are_told_before_anything_is_written(
    tmp_path, model_dir, capsys, changes, message
):
    assert main(settings(tmp_path, model_dir, **changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_episodes_that_never_begin_are_told(tmp_path, model_dir, capsys):
    short = {"kind": "local", "length": 20}
    assert main(settings(tmp_path, model_dir, count=1, sampler=short)) == 0
    said = capsys.readouterr().out
    assert "length: " in said and "tokens of context leave no room in 20" in said


def test_settings_that_cannot_begin_leave_those_of_the_run_before(tmp_path, model_dir):
    kept = tmp_path / "out.settings.json"
    kept.write_text("kept")
    assert main(settings(tmp_path, model_dir, sampler={"kind": "local", "slots": 0})) == 2
    assert kept.read_text() == "kept"


def test_servers_that_are_down_are_named(tmp_path, model_dir, capsys):
    address = f"http://127.0.0.1:{free_port()}"
    call = settings(tmp_path, model_dir, sampler={"kind": "sglang", "address": address})
    assert main(call) == 2
    assert address in capsys.readouterr().err
    env = {"name": "agentgym-webshop", "settings": {"address": address}}
    assert main(settings(tmp_path, model_dir, "other", env=env)) == 2
    assert address in capsys.readouterr().err


def test_other_settings_do_not_go_on_in_a_file(tmp_path, model_dir, capsys):
    with serving(potion_server()) as server:
        assert main(settings(tmp_path, model_dir, sampler=on_server(server))) == 0
        changed = {"rollout": {"max_turn_tokens": 100, "max_tokens": 1000, "seed": 1}}
        assert main(settings(tmp_path, model_dir, sampler=on_server(server), **changed)) == 2
    said = capsys.readouterr().err
    assert "made under other settings (rollout.seed was 0 and is now 1)" in said


def test_tasks_are_taken_evenly():
    tasks = [str(n) for n in range(10)]
    assert spread(tasks, 4) == ["0", "2", "5", "7"]
    assert spread(tasks, 10) == spread(tasks, 99) == spread(tasks, None) == tasks


def test_as_many_episodes_are_in_flight_as_the_sampler_serves():
    local = EvaluateConfig("model", "out.jsonl", sampler=SamplerConfig(slots=5))
    server = SamplerConfig("vllm", "http://127.0.0.1:1", concurrency=7)
    drafting = dataclasses.replace(local, agent=AgentConfig("dart"))
    assert (local.at_once, drafting.at_once) == (5, 2)
    assert EvaluateConfig("model", "out.jsonl", sampler=server).at_once == 7
    assert EvaluateConfig("model", "out.jsonl", in_flight=3).at_once == 3


CONFIGS = sorted(Path(__file__).parents[2].glob("configs/evaluate_*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_settings_that_ship_are_settings(path, capsys):
    assert main(["evaluate", "--config", str(path), "--print-config="]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["rollout"]["max_turns"] == 30
    env = EnvironmentConfig(**shown["env"])
    with pytest.raises(ValueError) as found:
        # It names the settings that there are, before it looks at the values.
        make_environment(env.name, {**env.settings, "nonsense": 1})
    known = str(found.value).partition("it has ")[2].split(", ")
    assert set(env.settings) <= set(known)


def test_environments_by_name():
    env = make_environment("potions", {"size": 4, "orders": 2})
    assert (env.name, env.config.size) == ("potions", 4)
    assert EnvironmentConfig("webshop").processes == 0
    assert EnvironmentConfig("scienceworld").processes == 4
    assert EnvironmentConfig("scienceworld", workers=2).processes == 2
    shop = make_environment("webshop", {})
    assert shop.tasks("test") and renderer_for(word_tokenizer(["x"]), "qwen3").prompt_ids(
        [{"role": "user", "content": "x"}], shop.tools
    )
