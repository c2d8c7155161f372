"""The report: reading LoGiC output, totals by hand, the plot, and what a failure leaves."""

import io
import json
import math
import random
import re
import warnings

import matplotlib.image
import pytest
from report_samples import make_page, make_record, make_turn, write_lines
from rich.console import Console

from race_jax import report as report_module
from race_jax.report import (
    find_fault,
    plot_sweep,
    read_records,
    summarise,
    summary_table,
    write_report,
)


def test_totals_by_hand():
    other = make_record(
        id="door/2",
        turns=[make_turn(1, "THINK", 40), make_turn(2, "SKIP", 0)],
        decreases={},
        tokens_forwarded=110,
        tokens_minimum=100,
        tokens_naive=100,
    )
    looser = make_record(epsilon=0.1, tokens_naive=None)
    looser["turns"] = [
        make_turn(1, "THINK", 30),
        make_turn(2, "SKIP", 20, tested=True),
        make_turn(3, "SKIP", 10, tested=True, uncertain=True),
    ]
    small, large = summarise([looser, make_record(), other])
    assert (small.epsilon, small.trajectories, small.turns) == (0.001, 2, 5)
    assert (small.tested, small.skipped, small.uncertain) == (2, 2, 0)
    assert small.skip_share == pytest.approx(2 / 5)  # a ratio of sums, not the mean of 1/3 and 1/2
    assert small.reasoning_before == 30 + 20 + 10 + 40 + 0
    assert small.reasoning_after == 30 + 10 + 40
    assert small.saved_share == pytest.approx(20 / 100)
    assert small.tokens_forwarded == 330 + 110
    assert small.tokens_minimum == 300 + 100
    assert small.tokens_naive == 900 + 100
    assert (large.skipped, large.uncertain, large.reasoning_after) == (2, 1, 30)
    # The counts of work compare only as a whole: without one of them none is shown.
    assert (large.tokens_forwarded, large.tokens_minimum, large.tokens_naive) == (None, None, None)


def test_totals_do_not_depend_on_record_order():
    records = [make_record(id=f"a/{n}", epsilon=e) for n in range(4) for e in (0.1, 0.001, 0.01)]
    shuffled = random.Random(0).sample(records, len(records))
    assert summarise(shuffled) == summarise(records)
    assert [row.epsilon for row in summarise(shuffled)] == [0.001, 0.01, 0.1]


def test_totals_without_reasoning_are_zero():
    (row,) = summarise([make_record(turns=[make_turn(1, "SKIP", 0)], decreases={})])
    assert row.saved_share == 0.0
    assert row.skip_share == 1.0
    assert summarise([]) == []


def test_console_table_fits_80_columns():
    big = make_record(turns=[make_turn(n, "THINK", 60) for n in range(1, 201)], decreases={})
    records = [big | {"id": f"t/{n}"} for n in range(50)]
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(records))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "600,000 → 600,000" in out.getvalue()
    assert "…" not in out.getvalue()


# Reading


def test_reads_what_was_written(tmp_path):
    records = [make_record(), make_record(epsilon=0.01), make_record(id="door/2 \u2028 é")]
    path = tmp_path / "covers.jsonl"
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_records(path) == records


def test_bad_lines_are_named_and_skipped(tmp_path):
    path = tmp_path / "covers.jsonl"
    good = json.dumps(make_record()).encode()
    path.write_bytes(
        b"\n".join(
            [
                good,
                b'{"id": "half',
                b'{"id": "\xff"}',
                json.dumps(make_record(epsilon=-1)).encode(),
                good,
                b"[]",
                b"[" * 100_000,
                json.dumps(make_record(id="other")).encode(),
            ]
        )
    )
    faults = []
    records = read_records(path, faults=faults)
    assert [record["id"] for record in records] == ["door/1", "other"]
    said = [re.sub(r".*line (\d+): ", r"\1 ", fault) for fault in faults]
    assert said[0].startswith("2 not JSON")
    assert said[1] == "3 byte 9 is not UTF-8"
    assert said[2] == "4 key `epsilon` is -1, not a finite number of at least 0"
    assert said[3] == "5 repeats 'door/1' at epsilon 0.001 from line 1"
    assert said[4] == "6 the line holds list, not an object"
    assert said[5].startswith("7 not JSON")
    assert len(faults) == 6
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert len(read_records(path)) == 2
    assert [str(w.message) for w in warned] == [f"{fault}; skipped" for fault in faults]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": ""}, "key `id` is '', not a text that is not empty"),
        ({"epsilon": math.nan}, "key `epsilon` is nan"),
        ({"epsilon": True}, "key `epsilon` is True"),
        ({"turns": []}, "key `turns` is []"),
        ({"turns": [{"turn": 1}]}, "turn 1: key `decision` is missing"),
        ({"turns": [make_turn(1, "KEEP")]}, "turn 1: key `decision` is 'KEEP'"),
        ({"turns": [make_turn(0, "THINK")]}, "turn 1: key `turn` is 0"),
        ({"turns": [make_turn(1, "THINK", -3)]}, "turn 1: key `reasoning_tokens` is -3"),
        ({"turns": [make_turn(1, "THINK", worst_turn=2)]}, "turn 1: key `worst_turn` is 2"),
        ({"turns": [make_turn(1, "THINK", max_decrease="1")]}, "key `max_decrease` is '1'"),
        ({"decreases": {"4": [0.1]}}, "key `decreases` has the key '4'"),
        ({"decreases": {"x": [0.1]}}, "key `decreases` has the key 'x'"),
        ({"decreases": {"3": [0.1, 0.2]}}, "`decreases`, turn 3: not a list of at most 1"),
        ({"decreases": {"3": ["a"]}}, "`decreases`, turn 3"),
        ({"decreases": []}, "key `decreases` is not an object"),
        ({"messages": ["hello"]}, "key `messages` is ['hello']"),
        ({"original_reasoning": "text"}, "key `original_reasoning` is 'text'"),
        ({"tokens_forwarded": 1.5}, "key `tokens_forwarded` is 1.5"),
    ],
)
def test_each_broken_rule_is_named(change, said, tmp_path):
    record = make_record(**change)
    assert said in find_fault(record)
    with pytest.raises(ValueError, match=r"record 1: .*race-jax logic"):
        write_report([record], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_files_that_hold_no_records(tmp_path):
    with pytest.raises(ValueError, match="there is no such file; make such a file with"):
        read_records(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match="the file is empty, not LoGiC output"):
        read_records(empty)
    other = write_lines(tmp_path / "other.jsonl", [{"id": "a", "messages": []}])
    with pytest.raises(ValueError, match="line 1: key `epsilon` is missing; no line is LoGiC"):
        read_records(other)


@pytest.mark.parametrize("epsilons", [(0.001,), (0.001, 0.01, 0.1), (0.0, 0.01), (0.0,)])
def test_plot_is_an_image(tmp_path, epsilons):
    path = tmp_path / "sweep.png"
    plot_sweep([make_record(epsilon=e) for e in epsilons], path)
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 400 and image.shape[1] > 800
    assert image[..., :3].min() < 0.5 < image[..., :3].mean()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="no records"):
        plot_sweep([], path)


def test_a_failure_leaves_the_old_report(tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    write_report([make_record()], out)
    before = out.read_bytes()

    def broken(*args, **options):
        yield "<!doctype html>"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_module, "render_page", broken)
    with pytest.raises(OSError, match="No space left"):
        write_report([make_record()], out)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="no records to report on"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="max_trajectories 0: show at least 1"):
        write_report([make_record()], tmp_path / "page.html", max_trajectories=0)
    with pytest.raises(OSError, match="No such file or directory"):
        write_report([make_record()], tmp_path / "none" / "page.html")
    with pytest.raises(ValueError, match="not a regular file"):
        write_report([make_record()], tmp_path)


def test_limit_on_transcripts_leaves_totals_whole(tmp_path):
    records = [make_record(id=f"t/{n}") for n in range(7)]
    page = make_page(tmp_path, records, max_trajectories=3)
    assert len(page.find("li", class_="h0")) == 3
    assert "The first 3 of 7 trajectories are shown" in page.source
    assert page.texts("td", page.find("tr", class_="r0")[0])[7] == "7"
