import functools
import inspect
import json
from pathlib import Path

import pytest

from race_jax.chat import renderer_for
from race_jax.models import load_model
from race_jax.report import read_records
from race_jax.rollout.results import read_rollouts
from race_jax.tokenizer import load_tokenizer
from race_jax.train import cli, story
from race_jax.train import quickstart as module
from race_jax.train.quickstart import MODELS, evaluation_of, quickstart
from race_jax.trajectories import read

SHORT = {
    "episodes": 6,
    "held_out": 3,
    "epsilon": "0.01,0.1",
    "cover_epsilon": 0.1,
    "size": 4,
    "drill_steps": 1,
    "steps": 2,
    "short": True,
}
SMALL = SHORT | {"short": False, "cover_steps": 1, "rl_steps": 1, "rl_prompts": 1, "tasks": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("work") / "quickstart"
    assert quickstart(out=str(out), **SMALL) == 0
    return out


def weights(out):
    files = sorted(out.glob("**/model.safetensors"))
    return [(file, file.stat().st_mtime_ns, file.read_bytes()) for file in files]


def test_it_leaves_trajectories_a_model_covers_and_a_page(made):
    train, held_out = (
        list(read(made / name, strict=True)) for name in ("train.jsonl", "held_out.jsonl")
    )
    assert (len(train), len(held_out)) == (6, 3)
    assert not {item.id for item in train} & {item.id for item in held_out}
    assert all(item.success and len(item.extra["needed"]) in (8, 10) for item in held_out)

    model, tokenizer = load_model(made / "model"), load_tokenizer(made / "model")
    assert model.config.model_type == "qwen3"
    assert model.vocab_size == len(tokenizer)
    tokens = renderer_for(tokenizer, "qwen3").encode(held_out[0]).assemble().tokens
    assert max(tokens) < model.vocab_size

    records = read_records(made / "covers.jsonl")
    keys = {(record["id"], record["epsilon"]) for record in records}
    assert keys == {(item.id, epsilon) for item in held_out for epsilon in (0.01, 0.1)}
    page = (made / "report.html").read_text(encoding="utf-8")
    assert held_out[0].id in page


def test_transformers_reads_the_model_that_it_leaves(made):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made / "model").eval()
    item = next(read(made / "held_out.jsonl"))
    tokens = renderer_for(load_tokenizer(made / "model"), "qwen3").encode(item).assemble()
    record = next(r for r in read_records(made / "covers.jsonl") if r["id"] == item.id)
    ids = torch.tensor(tokens.tokens[None].astype("int64"))
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(ids).logits[0, :-1].float(), -1)
    logprobs = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    means = [logprobs[a - 1 : b - 1].mean().item() for a, b in tokens.actions]
    assert means == pytest.approx(record["loglik_full"], abs=1e-4)


def test_it_ends_with_every_model_evaluated_on_the_same_tasks(made):
    results = json.loads((made / "results.json").read_text())
    assert [row["name"] for row in results] == ["base", "SFT", "RACE-SFT", "RACE-SFT-RL"]
    tasks = []
    for (_, model), row in zip(MODELS, results, strict=True):
        rollouts = list(read_rollouts(made / evaluation_of(model)))
        tasks.append({rollout.task for rollout in rollouts})
        assert row["all"]["episodes"] == len(rollouts) == 2
        assert row["solved"]["episodes"] == sum(rollout.success for rollout in rollouts)
    assert all(names == tasks[0] and len(names) == 2 for names in tasks)
    # RL on episodes that all fail alike changes nothing, so its weights may be RACE-SFT's.
    assert len({data for _, _, data in weights(made)}) >= 3
    for name in ("sweep.png", "results.png", "rl.png"):
        assert (made / name).read_bytes().startswith(b"\x89PNG")
    assert "RACE-SFT-RL" in (made / "rollouts.html").read_text(encoding="utf-8")


def test_a_second_run_keeps_what_is_finished(made, capsys):
    before = weights(made), (made / "covers.jsonl").read_bytes()
    assert quickstart(out=str(made), **SMALL) == 0
    assert (weights(made), (made / "covers.jsonl").read_bytes()) == before
    said = capsys.readouterr().out
    assert said.count("done in an earlier run, kept") == 9
    assert "The story" in said and "Against the turns" in said


def test_it_names_commands_that_run_as_they_stand(made, capsys):
    quickstart(out=str(made), **SMALL)
    said = capsys.readouterr().out.replace("\\\n", " ")
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  race-jax ")]
    assert [command[0] for command in commands] == ["logic", "report"]
    for command in commands:
        assert cli.main(command) == 0
    assert (made / "mine.html").is_file()


def test_a_run_of_rl_cut_short_by_a_signal_is_no_result_and_goes_on(made, monkeypatch, capsys):
    real, asked = story.rl, []

    def cut(config, *, console):
        asked.append(1)
        return real(config, console=console, until=1 if len(asked) == 1 else None)

    monkeypatch.setattr(story, "rl", cut)
    longer = SMALL | {"rl_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        quickstart(out=str(made), **longer)
    assert not (made / "race_sft_rl" / "model").exists()
    assert quickstart(out=str(made), **longer) == 0
    lines = (made / "race_sft_rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "4. RACE-SFT, on the covers: done in an earlier run, kept" in capsys.readouterr().out


def stages(out, monkeypatch, **settings):
    """Which stages a run does, with the costly ones replaced."""
    done = []

    def train(work, *_):
        done.append("training")
        for folder in ("base", "model"):
            Path(work[folder]).mkdir(exist_ok=True)
            for name in story.MODEL_FILES:
                Path(work[folder], name).touch()

    def compress(*_):
        raise KeyboardInterrupt

    write = story.write

    def noted(path, items):
        done.append(Path(path).name)
        return write(path, items)

    with monkeypatch.context() as patch:
        patch.setattr(story, "_train", train)
        patch.setattr(story, "logic", compress)
        patch.setattr(story, "write", noted)
        with pytest.raises(KeyboardInterrupt):
            quickstart(out=str(out), **SHORT | settings)
    return done


def test_only_stages_that_the_settings_touch_are_done_again(tmp_path, monkeypatch):
    out = tmp_path / "q"
    every = ["train.jsonl", "held_out.jsonl", "training"]
    assert stages(out, monkeypatch) == every
    assert stages(out, monkeypatch) == []
    assert stages(out, monkeypatch, steps=3) == ["training"]
    assert stages(out, monkeypatch, steps=3, held_out=4) == every[:2]
    assert stages(out, monkeypatch, seed=1) == every
    assert stages(out, monkeypatch, seed=1, fresh=True) == every
    (out / "train.jsonl").write_bytes((out / "train.jsonl").read_bytes() + b"\n")
    assert stages(out, monkeypatch, seed=1) == ["training"]
    (out / "held_out.jsonl").unlink()
    assert "held_out.jsonl" in stages(out, monkeypatch, seed=1)
    (out / "model" / "tokenizer.json").unlink()
    assert stages(out, monkeypatch, seed=1) == ["training"]


def test_covers_of_another_model_are_made_anew(tmp_path, monkeypatch):
    out, seen = tmp_path / "q", []
    stages(out, monkeypatch)

    def logic(model, trajectories, out, epsilon):
        seen.append(Path(out).exists())
        Path(out).write_text("lines")
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "logic", logic)

    def run(**settings):
        with pytest.raises(KeyboardInterrupt):
            quickstart(out=str(out), **SHORT | settings)

    run()
    run()
    run(epsilon="0.1,0.2")
    (out / "model" / "config.json").write_text("two")
    run(epsilon="0.1,0.2")
    assert seen == [False, True, False, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0}, "--held-out 0: it must be from 1"),
        ({"episodes": -1}, "--episodes -1"),
        ({"seed": -1}, "--seed -1: it must be from 0"),
        ({"epsilon": "0.1,x"}, "'x' is not a number"),
        ({"cover_epsilon": 0.2}, "--cover-epsilon 0.2: it must be one of --epsilon 0.01,0.1"),
        ({"rl_steps": 0}, "--rl-steps 0: it must be from 1"),
        ({"tasks": 0}, "--tasks 0: it must be from 1"),
        ({"size": 3}, "size is 3"),
        ({"steps": -1}, "training.steps is -1"),
    ],
)
def test_settings_out_of_range_are_named_before_any_work(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        quickstart(out=str(tmp_path / "q"), **SMALL | settings)
    assert not (tmp_path / "q").exists()


def test_files_that_are_not_its_own_are_left_alone(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"holds train\.jsonl, which is of no earlier run"):
        quickstart(out=str(tmp_path), **SMALL)
    assert (tmp_path / "train.jsonl").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    with pytest.raises(ValueError, match="is a file; name a folder"):
        quickstart(out=str(tmp_path / "train.jsonl"), **SMALL)


def test_the_command_line_reaches_every_setting(monkeypatch):
    seen = {}

    @functools.wraps(quickstart)
    def fake(**settings):
        seen.update(settings)
        return 0

    monkeypatch.setattr(module, "quickstart", fake)
    assert (
        cli.main(["quickstart", "--seed", "3", "--fresh", "--steps", "7", "--held-out", "9"]) == 0
    )
    assert (seen["seed"], seen["fresh"], seen["steps"], seen["held_out"]) == (3, True, 7, 9)
    defaults = {name: p.default for name, p in inspect.signature(quickstart).parameters.items()}
    assert seen == defaults | {"seed": 3, "fresh": True, "steps": 7, "held_out": 9}
