"""`race-jax report`: exit codes, what the console says, and that the input is safe."""

import dataclasses

import pytest
from carl_samples import grow
from report_samples import make_record, write_lines

from race_jax.metrics import MetricWriter
from race_jax.rollout.results import RolloutFile
from race_jax.train.cli import main
from race_jax.train.report_cli import report


def test_report_is_written_and_skipped_lines_are_counted(tmp_path, capsys):
    path = write_lines(tmp_path / "covers.jsonl", [make_record(), {"id": "[red]x"}])
    out, plot = tmp_path / "page.html", tmp_path / "sweep.png"
    assert main(["report", str(path), "--out", str(out), "--plot", str(plot)]) == 1
    said = capsys.readouterr()
    assert "line 2: key `epsilon` is missing" in said.err
    assert "from 1 records, 1 lines skipped" in said.out
    assert "LoGiC by threshold" in said.out
    assert plot.is_file()
    assert "1 line of the file could not be read and was skipped" in out.read_text()


def test_title_and_limit_reach_the_page(tmp_path):
    path = write_lines(tmp_path / "covers.jsonl", [make_record(id=f"t/{n}") for n in range(3)])
    out = tmp_path / "page.html"
    assert report(str(path), str(out), title="Mine", max_trajectories=2) == 0
    assert "<title>Mine</title>" in out.read_text()
    assert "The first 2 of 3 trajectories are shown" in out.read_text()


def test_many_skipped_lines_are_summed_up(tmp_path, capsys):
    path = write_lines(tmp_path / "covers.jsonl", [make_record(), *[{}] * 30])
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 1
    assert "skipped: 10 more lines" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_input_is_never_replaced(tmp_path, capsys, flag):
    path = write_lines(tmp_path / "covers.jsonl", [make_record()])
    before = path.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(path)
    options = ["--out", str(tmp_path / "page.html"), flag, str(link)]
    assert main(["report", str(path), *options]) == 2
    assert "would replace the input" in capsys.readouterr().err
    assert path.read_bytes() == before and link.is_symlink()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file; make such a file with `race-jax logic"),
        ("", "the file is empty, not LoGiC output; make such a file"),
        ('{"id": "a", "messages": []}', "line 1: key `epsilon` is missing; no line is LoGiC"),
    ],
)
def test_errors_name_the_remedy_and_write_nothing(tmp_path, capsys, content, said):
    path = tmp_path / "[none].jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert said in error and "[none].jsonl" in error
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("fork", "rule"),
    [
        ((99, 1), "the tree holds no such sample"),
        ((0, 500), "turns of that one"),
        (None, "the tree holds no such sample"),
    ],
)
def test_trees_that_cannot_be_drawn_are_told_beside_the_page(tmp_path, capsys, fork, rule):
    path, page = tmp_path / "step_000001.jsonl", tmp_path / "page.html"
    rollouts = grow(("a",))[0]
    at = next(n for n, rollout in enumerate(rollouts) if rollout.fork)
    # None stands for a cycle: an episode that leaves itself.
    rollouts[at] = dataclasses.replace(rollouts[at], fork=fork or (rollouts[at].sample, 1))
    with RolloutFile(path, {}) as file:
        for rollout in rollouts:
            file.append(rollout)
    assert main(["report", str(path), "--out", str(page)]) == 1
    error = capsys.readouterr().err
    assert "step_000001.jsonl: The trees cannot be drawn" in error and rule in error
    assert "The trees cannot be drawn" in page.read_text()
    told = ["carl-criticality", "--rollouts", str(path), "--out", str(tmp_path / "told.jsonl")]
    assert main(told) == 2
    error = capsys.readouterr().err
    assert "step_000001.jsonl: digits/a/" in error and rule in error


def test_folder_that_is_not_there(tmp_path, capsys):
    path = write_lines(tmp_path / "covers.jsonl", [make_record()])
    assert main(["report", str(path), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_the_curves_of_a_run(tmp_path, capsys):
    with MetricWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 4.0 / step})
    path = str(tmp_path / "metrics.jsonl")
    assert main(["report", path]) == 0
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    line = next(x for x in capsys.readouterr().out.splitlines() if "train/loss" in x)
    assert line.replace("│", " ").split() == ["train/loss", "3", "4", "1.33333"]
    assert main(["report", path, "--plot", path]) == 2
    assert "would replace the input" in capsys.readouterr().err
