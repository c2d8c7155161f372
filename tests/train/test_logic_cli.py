"""The logic command end to end, on a tiny random checkpoint in the ordinary format."""

import errno
import json
import math
import os
import re

import numpy as np
import pytest
from checkpoint_samples import save_tiny, tiny_config

from race_jax.chat import renderer_for
from race_jax.envs.potion_text import words
from race_jax.envs.potions import PotionShopConfig, oracle_trajectory
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.logic.cover import find_cover
from race_jax.logic.engine import Engine
from race_jax.logic.scoring import Scorer
from race_jax.models import init_model, load_model, save_model
from race_jax.tokenizer import load_tokenizer
from race_jax.train.cli import main
from race_jax.train.logic_cli import group_by_length, parse_epsilons
from race_jax.trajectories import read, to_json
from race_jax.types import Trajectory

KEYS = [
    *("id", "model", "epsilon", "dtype", "skip_form", "noise_floor", "turns", "loglik_full"),
    *("loglik_final", "decreases", "tokens_forwarded", "tokens_minimum", "tokens_naive"),
    *("messages", "reward", "success", "model_id", "input_id"),
]
FAST = ["--slots", "2", "--rows", "4"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def records():
    return [to_json(oracle_trajectory(seed)) for seed in range(5)]


def write(path, rows):
    text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path, records):
    return write(tmp_path / "in.jsonl", records)


def run(model, file, out, *options):
    return main(
        ["logic", "--model", model, "--trajectories", file, "--out", str(out), *FAST, *options]
    )


def load(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_hold_what_algorithm_1_decides(model_dir, file, tmp_path, records):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--epsilon", "0.0001,0.01", "--save-tokens") == 0
    got = load(out)
    assert sorted((r["id"], r["epsilon"]) for r in got) == sorted(
        (r["id"], e) for r in records for e in (0.0001, 0.01)
    )
    model = load_model(model_dir)
    score = Scorer(model, model.params).score
    renderer = renderer_for(load_tokenizer(model_dir), "qwen3")
    items = {item.id: item for item in read(file) if isinstance(item, Trajectory)}
    skips = set()
    for record in got:
        assert set(KEYS) <= set(record)
        assert list(record)[:6] == KEYS[:6]
        tokens = renderer.encode(items[record["id"]])
        cover = find_cover(tokens, score, record["epsilon"])
        decided = [t["decision"] == "SKIP" for t in record["turns"]]
        assert decided == [t in cover.removed for t in range(len(tokens.turns))]
        assert [t["turn"] for t in record["turns"]] == list(range(1, len(decided) + 1))
        assert [t["tested"] for t in record["turns"]] == [False] + [True] * (len(decided) - 1)
        np.testing.assert_allclose(record["loglik_full"], cover.loglik_full, atol=1e-5)
        np.testing.assert_allclose(record["loglik_final"], cover.loglik_final, atol=1e-5)
        for removal in cover.removals:
            row = record["decreases"][str(removal.turn + 1)]
            assert len(row) == len(decided) - removal.turn
            known = [d for d in row if d is not None]
            np.testing.assert_allclose(known, removal.decreases, atol=1e-5)
            assert row[len(known) :] == [None] * (len(row) - len(known))
            turn = record["turns"][removal.turn]
            assert turn["worst_turn"] == removal.worst_turn + 1
            assert math.isclose(turn["max_decrease"], removal.max_decrease, abs_tol=1e-5)
        # The token ids give the scored sequence, and the messages lack what was removed.
        ids = list(record["tokens"]["prompt"])
        for turn, skipped in zip(record["tokens"]["turns"], decided, strict=True):
            ids += turn["skip"] if skipped else turn["reasoning"]
            ids += turn["action"] + turn["observation"]
        assert ids == tokens.assemble(cover.removed).tokens.tolist()
        kept = [m["reasoning_content"] for m in record["messages"] if m["role"] == "assistant"]
        assert [text == "" for text in kept] == decided
        skips.update(decided)
    assert skips == {True, False}


def test_a_stopped_run_goes_on_and_neither_repeats_nor_loses(model_dir, file, tmp_path, capsys):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(model_dir, file, whole, "--epsilon", "0.0001,0.01")
    lines = whole.read_text().splitlines(keepends=True)
    # Killed in the middle of the fourth record: one trajectory has one of its two thresholds.
    out.write_text("".join(lines[:3]) + lines[3][:50])
    assert run(model_dir, file, out, "--epsilon", "0.0001,0.01") == 0
    assert "1 already in" in capsys.readouterr().out
    assert out.read_text().startswith("".join(lines[:3]))
    order = {(r["id"], r["epsilon"]): r for r in load(whole)}
    again = load(out)
    assert len(again) == len(order) == len({(r["id"], r["epsilon"]) for r in again})
    for record in again:
        want = order[record["id"], record["epsilon"]]
        decisions = [[t["decision"] for t in x["turns"]] for x in (record, want)]
        assert decisions[0] == decisions[1]
    before = out.read_bytes()
    assert run(model_dir, file, out, "--epsilon", "0.0001,0.01") == 0
    assert out.read_bytes() == before


def test_a_threshold_can_be_added_without_repeating_the_others(
    model_dir, file, tmp_path, monkeypatch
):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--epsilon", "0.0001") == 0
    before = out.read_text()
    asked = []
    real = Engine.run

    def spy(self, trajectories, epsilons, on_step=None):
        asked.append(list(epsilons))
        return real(self, trajectories, epsilons, on_step)

    monkeypatch.setattr(Engine, "run", spy)
    assert run(model_dir, file, out, "--epsilon", "0.0001,0.01") == 0
    assert out.read_text().startswith(before)
    assert sorted(r["epsilon"] for r in load(out)) == [0.0001] * 5 + [0.01] * 5
    assert asked[-1] == [0.01]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--epsilon", "0.5"], "results at epsilon 0.001 too: add them (--epsilon 0.001,0.5)"),
        (["--dtype", "bfloat16"], "dtype was float32, now bfloat16"),
        (["--skip-form", "template"], "skip_form was close, now template"),
        (["--save-tokens"], "save_tokens was False, now True"),
    ],
)
def test_settings_do_not_mix_in_one_output(model_dir, file, tmp_path, capsys, options, named):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--max-trajectories", "1") == 0
    before = out.read_bytes()
    assert run(model_dir, file, out, *options) == 2
    assert named in capsys.readouterr().err
    assert out.read_bytes() == before


def test_another_checkpoint_does_not_mix_either(model_dir, file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--max-trajectories", "1") == 0
    other = tmp_path / "other"
    tokenizer = load_tokenizer(model_dir)
    save_model(init_model(tiny_config(len(tokenizer)), 1), other)
    tokenizer.save_pretrained(other)
    assert run(str(other), file, out) == 2
    assert "model_id was" in capsys.readouterr().err


def test_the_same_checkpoint_elsewhere_is_the_same(model_dir, file, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--max-trajectories", "1") == 0
    link = tmp_path / "link"
    link.symlink_to(model_dir)
    assert run(str(link), file, out, "--max-trajectories", "2") == 0
    assert len(load(out)) == 2


def test_changed_input_under_an_old_name_is_refused(model_dir, records, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    file = write(tmp_path / "in.jsonl", records[:1])
    assert run(model_dir, file, out) == 0
    write(tmp_path / "in.jsonl", [dict(records[1], id=records[0]["id"])])
    assert run(model_dir, file, out) == 2
    assert "the input file changed" in capsys.readouterr().err


def test_bad_trajectories_are_named_counted_and_skipped(model_dir, records, tmp_path, capsys):
    long = json.loads(json.dumps(dict(records[3], id="long")))
    long["messages"][1]["content"] += " abc" * 2000
    empty = json.loads(json.dumps(dict(records[3], id="empty")))
    empty["messages"][2] = {"role": "assistant", "content": "", "reasoning_content": "x"}
    rows = [
        *(records[0], "{not json", dict(records[0]), long, empty),
        {"id": "none", "messages": [{"role": "user", "content": "hi"}]},
        records[2],
    ]
    file = write(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out) == 1
    said = capsys.readouterr().out
    for line, what in (
        *((2, "json"), (3, "duplicate"), (4, "context is 1024"), (5, "empty"), (6, "turn")),
    ):
        assert any(f"{file}:{line}:" in x and what in x for x in said.splitlines()), (line, what)
    assert "5 bad trajectories were skipped" in said
    assert {r["id"] for r in load(out)} == {records[0]["id"], records[2]["id"]}


def test_strict_stops_at_the_first(model_dir, records, tmp_path, capsys):
    file = write(tmp_path / "in.jsonl", [records[0], "{", "{"])
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--strict") == 1
    assert capsys.readouterr().out.count("bad trajectory: ") == 1
    assert load(out) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "-1"], "at least 0"),
        (["--epsilon", "nan"], "finite"),
        (["--epsilon", "0.1,x"], "'x' is not a number"),
        (["--dtype", "float16"], "'float32', 'bfloat16'"),
        (["--skip-form", "none"], "close"),
        (["--max-trajectories", "0"], "at least 1"),
        (["--slots", "0"], "slots is 0"),
        (["--lanes", "0"], "--lanes 0: it must be at least 1"),
    ],
)
def test_bad_options(model_dir, file, tmp_path, capsys, options, message):
    assert run(model_dir, file, tmp_path / "out.jsonl", *options) == 2
    assert message in capsys.readouterr().err


def test_missing_files(model_dir, file, tmp_path, capsys):
    assert run(str(tmp_path / "nowhere"), file, tmp_path / "out.jsonl") == 2
    assert "nowhere" in capsys.readouterr().err
    assert run(model_dir, str(tmp_path / "no.jsonl"), tmp_path / "out.jsonl") == 2
    assert "no.jsonl" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(file, tmp_path, capsys):
    path = tmp_path / "small"
    tokenizer = word_tokenizer(words(PotionShopConfig().size))
    save_model(init_model(tiny_config(len(tokenizer) - 20), 0), path)
    tokenizer.save_pretrained(path)
    assert run(str(path), file, tmp_path / "out.jsonl") == 1
    assert "do not belong together" in capsys.readouterr().out


def test_a_full_disk_keeps_whole_records(model_dir, file, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    real, room = os.write, [3]

    def full(descriptor, data):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr("race_jax.jsonl.os.write", full)
    assert run(model_dir, file, out) == 2
    assert "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    kept = load(out)
    assert len(kept) == 3
    assert run(model_dir, file, out) == 0
    assert [r["id"] for r in load(out)[:3]] == [r["id"] for r in kept]
    assert len(load(out)) == 5


def test_saved_tokens_read_back_and_decide_alike(model_dir, file, tmp_path):
    out, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    assert run(model_dir, file, out, "--epsilon", "0.01", "--save-tokens") == 0
    rows = [{"id": r["id"], "tokens": r["tokens"]} for r in load(out)]
    ids = write(tmp_path / "ids.jsonl", rows)
    assert run(model_dir, ids, again, "--epsilon", "0.01") == 0
    decisions = {r["id"]: [t["decision"] for t in r["turns"]] for r in load(again)}
    for record in load(out):
        assert decisions[record["id"]] == [t["decision"] for t in record["turns"]]


def test_ids_in_no_known_format_are_scored_and_have_no_messages(model_dir, tmp_path):
    renderer = renderer_for(load_tokenizer(model_dir), "qwen3")
    skip = list(renderer.skip_ids)
    turn = {"reasoning": [40, *skip], "skip": skip, "action": [50, 51], "observation": []}
    prompt = [30, 31, *renderer.generation_prompt]
    first = dict(turn, observation=[60, *renderer.generation_prompt])
    row = {"id": "ids", "tokens": {"prompt": prompt, "turns": [first, turn]}}
    out = tmp_path / "out.jsonl"
    assert run(model_dir, write(tmp_path / "ids.jsonl", [row]), out) == 0
    (record,) = load(out)
    assert record["messages"] == [] and len(record["turns"]) == 2


def test_the_template_form_scores_the_family_s_own_empty_block(model_dir, file, tmp_path):
    close, template = tmp_path / "close.jsonl", tmp_path / "template.jsonl"
    assert run(model_dir, file, close, "--save-tokens") == 0
    options = ["--save-tokens", "--skip-form", "template"]
    assert run(model_dir, file, template, *options) == 0
    a, b = (min(load(path), key=lambda record: record["id"]) for path in (close, template))
    assert a["tokens"]["turns"][1]["skip"] != b["tokens"]["turns"][1]["skip"]
    assert len(b["tokens"]["turns"][1]["skip"]) == len(a["tokens"]["turns"][1]["skip"]) + 2
    # The opener is not sampled in either form, so reasoning counts agree.
    assert [t["reasoning_tokens"] for t in a["turns"]] == [
        t["reasoning_tokens"] for t in b["turns"]
    ]


def test_bfloat16_reports_a_floor_above_the_papers_threshold(model_dir, file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(model_dir, file, out, "--dtype", "bfloat16", "--epsilon", "1e-6") == 0
    floor = load(out)[0]["noise_floor"]
    assert floor > 1e-6
    assert "noise floor is above epsilon 1e-06" in capsys.readouterr().out
    for record in load(out):
        for turn in record["turns"]:
            if turn["tested"]:
                near = abs(turn["max_decrease"] - 1e-6) < floor
                assert turn["uncertain"] == near


def test_epsilons_are_parsed_sorted_and_unique():
    assert parse_epsilons("0.01, 0.001,0.01") == (0.001, 0.01)


def test_groups_share_a_cache_length():
    from race_jax.train.logic_cli import Source

    sources = [Source(i, str(i), "", n, 1) for i, n in enumerate([5000, 100, 2048, 2049, 4096])]
    groups = group_by_length(sources)
    assert [[s.tokens for s in g] for g in groups] == [[100, 2048], [2049, 4096], [5000]]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"race-jax \d+\.\d+\S*\n", capsys.readouterr().out)


def test_usage_names_every_command(capsys):
    assert main(["--help"]) == 0
    assert main(["nonsense"]) == 2
    captured = capsys.readouterr()
    for name in ("quickstart", "logic", "report", "trajectories check"):
        assert name in captured.out and name in captured.err
    assert "no command 'nonsense'" in captured.err


def test_help_of_a_group_names_its_commands(capsys):
    assert main(["trajectories", "--help"]) == 0
    said = capsys.readouterr().out
    assert "trajectories check" in said and "quickstart" not in said


def test_a_foreign_file_with_a_torn_end_is_refused_untouched(model_dir, file, tmp_path, records):
    other = tmp_path / "other.jsonl"
    text = "".join(json.dumps(r) + "\n" for r in records[:2])[:-40]
    other.write_text(text, encoding="utf-8")
    assert run(model_dir, file, other) == 2
    assert other.read_text(encoding="utf-8") == text
