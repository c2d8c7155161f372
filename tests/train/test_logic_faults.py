"""What the logic command does with files and inputs that would harm it, or that it would harm."""

import json
import os

import numpy as np
import pytest

from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShopConfig, oracle_trajectory
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.models import ModelConfig, init_model, save_model
from race_jax.train import logic_cli
from race_jax.train.cli import main
from race_jax.trajectories import to_json

POISON = "mandrake"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny random checkpoint whose embedding of one word is not a number."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = word_tokenizer([*words(PotionShopConfig().size), POISON])
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 1024,
        }
    )
    model = init_model(config, 0)
    (poisoned,) = tokenizer.encode(POISON)
    model.params["embed"] = model.params["embed"].at[poisoned].set(np.nan)
    save_model(model, path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def records():
    return [to_json(oracle_trajectory(seed)) for seed in range(3)]


@pytest.fixture
def file(tmp_path, records):
    return write(tmp_path / "in.jsonl", records)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def run(model, file, out, *options):
    sizes = ["--slots", "2", "--rows", "4"]
    files = ["--model", model, "--trajectories", str(file), "--out", str(out)]
    return main(["logic", *files, *sizes, *options])


def load(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def poisoned(record, name):
    """The record with the word in its prompt; short, so that calibration meets it first."""
    record = json.loads(json.dumps(dict(record, id=name)))
    record["messages"] = record["messages"][:3]
    record["messages"][1]["content"] += f" {POISON}"
    return record


def test_ids_are_printed_as_text(model_dir, records, tmp_path, capsys):
    odd = "[/b] [red]x\x1b[2J"
    rows = [records[0], poisoned(records[0], odd), dict(records[1], id=odd)]
    assert run(model_dir, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl") == 1
    said = capsys.readouterr().out
    assert "[/b] [red]x" in said and "\x1b[2J" not in said


def test_many_bad_lines_are_counted_and_only_the_first_are_named(model_dir, file, tmp_path, capsys):
    with open(file, "a", encoding="utf-8") as stream:
        stream.write("no record\n" * 53)
    assert run(model_dir, file, tmp_path / "out.jsonl") == 1
    said = capsys.readouterr().out
    assert said.count("bad trajectory: ") == 50
    assert "... and 3 more; race-jax trajectories check names them" in said
    assert "53 bad trajectories were skipped" in said


@pytest.mark.parametrize("through_link", [False, True])
def test_the_input_is_never_the_output(model_dir, file, tmp_path, capsys, through_link):
    # A torn last line is what opening an output would cut off.
    with open(file, "a", encoding="utf-8") as stream:
        stream.write('{"id": "torn", "mess')
    with open(file, "rb") as stream:
        before = stream.read()
    out = file
    if through_link:
        out = tmp_path / "link.jsonl"
        out.symlink_to(file)
    assert run(model_dir, file, out) == 2
    assert "is the input itself; name another file" in capsys.readouterr().err
    with open(file, "rb") as stream:
        assert stream.read() == before


def test_outputs_that_cannot_be_made(model_dir, file, tmp_path, capsys):
    for out, message in (
        (tmp_path / "no" / "where.jsonl", "is not there; make it first"),
        (tmp_path, "is a directory; name a file in it"),
        ("", "is a directory; name a file in it"),
    ):
        assert run(model_dir, file, out) == 2
        assert message in capsys.readouterr().err


def test_inputs_that_cannot_be_read_twice_leave_no_output(model_dir, tmp_path, capsys):
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    for given, message in (
        (tmp_path / "none.jsonl", "there is no such file"),
        (tmp_path, "must be a regular file, since it is read twice"),
        (pipe, "must be a regular file, since it is read twice"),
    ):
        assert run(model_dir, given, out) == 2
        assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": [1]}, "key `epsilon` is [1]"),
        ({"id": ["x"]}, "key `id` is ['x']"),
        ({"turns": 3}, "key `turns` is 3"),
    ],
)
def test_an_output_that_holds_something_else(model_dir, file, tmp_path, capsys, change, message):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--max-trajectories", "1") == 0
    write(out, [dict(load(out)[0], **change)])
    before = out.read_bytes()
    assert run(model_dir, file, out) == 2
    said = capsys.readouterr().err
    assert message in said and "record 1" in said and "name another --out" in said
    assert out.read_bytes() == before


def test_minus_zero_is_zero(model_dir, file, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--epsilon=-0.0", "--max-trajectories", "1") == 0
    assert '"epsilon": 0.0' in out.read_text()
    assert run(model_dir, file, out, "--epsilon", "0", "--max-trajectories", "1") == 0
    assert len(load(out)) == 1


def test_a_trajectory_that_cannot_be_scored_does_not_stop_the_calibration(
    model_dir, records, tmp_path, capsys
):
    rows = [records[0], poisoned(records[0], "bad1"), poisoned(records[1], "bad2"), records[1]]
    out = tmp_path / "out.jsonl"
    assert run(model_dir, write(tmp_path / "in.jsonl", rows), out) == 1
    said = capsys.readouterr().out
    assert said.count("is nan") == 2 and "2 bad trajectories" in said
    assert {r["id"] for r in load(out)} == {records[0]["id"], records[1]["id"]}
    assert run(model_dir, write(tmp_path / "only.jsonl", rows[1:3]), tmp_path / "none.jsonl") == 1
    assert (tmp_path / "none.jsonl").read_text() == ""


@pytest.mark.parametrize("kept", [0, 1])
def test_an_input_that_changes_under_the_run_is_noticed(
    model_dir, file, records, tmp_path, capsys, monkeypatch, kept
):
    def load_and_change(*args, **options):
        rows = [dict(records[0], id=records[1]["id"]), *records[2:]]
        write(tmp_path / "in.jsonl", [*records[:kept], *rows] if kept else rows[1:])
        return real(*args, **options)

    real = logic_cli.load_model
    monkeypatch.setattr(logic_cli, "load_model", load_and_change)
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out) == 2
    assert "changed while this run read it" in capsys.readouterr().err
    assert all(r["id"] == records[0]["id"] for r in load(out))


def test_a_trajectory_as_long_as_the_context(model_dir, records, tmp_path, capsys):
    file = write(tmp_path / "in.jsonl", records[:1])
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--save-tokens") == 0
    (record,) = load(out)
    tokens = record["tokens"]
    length = len(tokens["prompt"]) - 1
    for turn in tokens["turns"]:
        length += sum(len(turn[part]) for part in ("reasoning", "action", "observation"))
    length -= len(tokens["turns"][-1]["observation"])
    config = json.loads((tmp_path / model_dir / "config.json").read_text())
    for context, code in ((length, 0), (length - 1, 1)):
        folder = tmp_path / str(context)
        folder.mkdir()
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).symlink_to(f"{model_dir}/{name}")
        changed = dict(config, max_position_embeddings=context)
        (folder / "config.json").write_text(json.dumps(changed))
        assert run(str(folder), file, tmp_path / f"{context}.jsonl") == code
    assert f"{length} tokens to score, but the model's context is {length - 1}" in (
        capsys.readouterr().out
    )
    (same,) = load(tmp_path / f"{length}.jsonl")
    assert [t["decision"] for t in same["turns"]] == [t["decision"] for t in record["turns"]]


def test_an_interrupted_run_says_how_to_go_on(model_dir, file, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(logic_cli.Run, "_record", stop)
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(model_dir, file, out) == 0
    assert len(load(out)) == 3
