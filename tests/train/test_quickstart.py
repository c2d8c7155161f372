import functools
import inspect
import io
from pathlib import Path

import pytest
from rich.console import Console

from race_jax.chat import renderer_for
from race_jax.models import load_model
from race_jax.report import read_records
from race_jax.tokenizer import load_tokenizer
from race_jax.train import cli
from race_jax.train import quickstart as module
from race_jax.train.quickstart import cover_table, quickstart
from race_jax.trajectories import read

SMALL = {
    "episodes": 6,
    "held_out": 2,
    "epsilon": "0.01,0.1",
    "size": 4,
    "drill_steps": 1,
    "steps": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("work") / "quickstart"
    assert quickstart(out=str(out), **SMALL) == 0
    return out


def weights(out):
    file = out / "model" / "model.safetensors"
    return file.stat().st_mtime_ns, file.read_bytes()


def test_it_leaves_trajectories_a_model_covers_and_a_page(made):
    train, held_out = (
        list(read(made / name, strict=True)) for name in ("train.jsonl", "held_out.jsonl")
    )
    assert (len(train), len(held_out)) == (6, 2)
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


def test_a_second_run_keeps_what_is_finished(made, capsys):
    before = weights(made), (made / "covers.jsonl").read_bytes()
    assert quickstart(out=str(made), **SMALL) == 0
    assert (weights(made), (made / "covers.jsonl").read_bytes()) == before
    said = capsys.readouterr().out
    assert "1. trajectories: done in an earlier run, kept" in said
    assert "2. training: done in an earlier run, kept" in said


def test_it_names_commands_that_run_as_they_stand(made, capsys):
    quickstart(out=str(made), **SMALL)
    said = capsys.readouterr().out.replace("\\\n", " ")
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  race-jax ")]
    assert [command[0] for command in commands] == ["logic", "report"]
    for command in commands:
        assert cli.main(command) == 0
    assert (made / "mine.html").is_file()


def test_a_run_stopped_in_training_goes_on_from_its_trajectories(tmp_path, monkeypatch, capsys):
    out = tmp_path / "q"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", stop)
        with pytest.raises(KeyboardInterrupt):
            quickstart(out=str(out), **SMALL)
    first = (out / "train.jsonl").stat().st_mtime_ns

    trained = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", lambda *_: trained.append(1))
        patch.setattr(module, "_compress", stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                quickstart(out=str(out), **SMALL)
    # The second training left no model, so it ran twice; the trajectories stayed.
    assert trained == [1, 1]
    assert (out / "train.jsonl").stat().st_mtime_ns == first
    assert "1. trajectories: done in an earlier run, kept" in capsys.readouterr().out


def stages(out, monkeypatch, **settings):
    """Which stages a run does, with the costly ones replaced."""
    done = []

    def train(work, *_):
        done.append("training")
        Path(work["model"]).mkdir(exist_ok=True)
        for name in module.MODEL_FILES:
            Path(work["model"], name).touch()

    def compress(work, epsilon):
        raise KeyboardInterrupt

    write = module.write

    def noted(path, items):
        done.append(Path(path).name)
        return write(path, items)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", train)
        patch.setattr(module, "_compress", compress)
        patch.setattr(module, "write", noted)
        with pytest.raises(KeyboardInterrupt):
            quickstart(out=str(out), **SMALL | settings)
    return done


def test_only_stages_that_the_settings_touch_are_done_again(tmp_path, monkeypatch):
    out = tmp_path / "q"
    every = ["train.jsonl", "held_out.jsonl", "training"]
    assert stages(out, monkeypatch) == every
    assert stages(out, monkeypatch) == []
    assert stages(out, monkeypatch, steps=3) == ["training"]
    assert stages(out, monkeypatch, steps=3, held_out=3) == every[:2]
    assert stages(out, monkeypatch, seed=1) == every
    assert stages(out, monkeypatch, seed=1, fresh=True) == every
    (out / "train.jsonl").write_bytes((out / "train.jsonl").read_bytes() + b"\n")
    assert stages(out, monkeypatch, seed=1) == ["training"]
    (out / "held_out.jsonl").unlink()
    assert "held_out.jsonl" in stages(out, monkeypatch, seed=1)
    (out / "model" / "tokenizer.json").unlink()
    assert stages(out, monkeypatch, seed=1) == ["training"]


@pytest.mark.parametrize("notes", ['{"1. traj', "", "[1]", "null"])
def test_notes_that_cannot_be_read_count_for_nothing(tmp_path, monkeypatch, notes):
    out = tmp_path / "q"
    stages(out, monkeypatch)
    (out / "quickstart.json").write_text(notes)
    assert stages(out, monkeypatch) == ["train.jsonl", "held_out.jsonl", "training"]


def test_covers_of_another_model_are_made_anew(tmp_path, monkeypatch):
    work = module.Workspace(str(tmp_path / "q"), Console(quiet=True))
    for name in ("model", "held_out.jsonl"):
        (work.path / name).write_text("") if "." in name else (work.path / name).mkdir()
    (work.path / "model" / "config.json").write_text("one")
    seen = []

    def logic(model, trajectories, out, epsilon):
        seen.append(Path(out).exists())
        Path(out).write_text("lines")
        return 0

    monkeypatch.setattr(module, "logic", logic)
    module._compress(work, "0.1")
    module._compress(work, "0.1")
    module._compress(work, "0.1,0.2")
    (work.path / "model" / "config.json").write_text("two")
    module._compress(work, "0.1,0.2")
    assert seen == [False, True, False, False]


def record(name, epsilon, decisions):
    turns = [
        {"decision": decision, "tested": t > 0, "reasoning_tokens": tokens}
        for t, (decision, tokens) in enumerate(decisions)
    ]
    return {"id": name, "epsilon": epsilon, "turns": turns}


def test_the_table_counts_tested_turns_by_hand():
    records = [
        record("a", 0.1, [("THINK", 7), ("SKIP", 5), ("THINK", 7), ("THINK", 5)]),
        record("b", 0.1, [("THINK", 7), ("SKIP", 7), ("THINK", 6)]),
        record("a", 0.5, [("THINK", 7), ("SKIP", 5), ("SKIP", 7), ("SKIP", 5)]),
        record("b", 0.5, [("THINK", 7), ("SKIP", 7), ("SKIP", 6)]),
    ]
    needed = {"a": [True, False, True, False], "b": [True, True, True]}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(cover_table(records, needed))
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "%" in line]
    # 0.1: 2 of 7 turns skipped; 12 of 44 tokens; tested needed turns: a3, b2, b3, of which a3 and
    # b3 are kept; kept tested turns: a3, a4, b3.
    assert [cell.strip() for cell in rows[0]] == ["0.1", "28.6%", "27.3%", "66.7%", "66.7%"]
    # 0.5: nothing tested is kept: 30 of 44 tokens saved, precision of nothing is no number.
    assert [cell.strip() for cell in rows[1]] == ["0.5", "71.4%", "68.2%", "0.0%", "-"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0}, "--held-out 0: it must be from 1"),
        ({"episodes": -1}, "--episodes -1"),
        ({"seed": -1}, "--seed -1: it must be from 0"),
        ({"epsilon": "0.1,x"}, "'x' is not a number"),
        ({"size": 3}, "size is 3"),
        ({"steps": -1}, "training.steps is -1"),
    ],
)
def test_settings_out_of_range_are_named_before_any_work(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        quickstart(out=str(tmp_path / "q"), **settings)
    assert not (tmp_path / "q").exists()


def test_files_that_are_not_its_own_are_left_alone(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"holds train\.jsonl, which no quickstart made"):
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
