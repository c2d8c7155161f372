"""Measures of evaluated episodes, by hand."""

import itertools
import math

import pytest
from rich.console import Console

from race_jax.rollout.measures import by_kind, measure, measures_table, plot_measures, wilson
from race_jax.rollout.results import Rollout, TurnNote


def note(sampled=10, reasoning=0, **changes):
    given = {"truncated": False, "carried_out": 1, "errors": (), **changes}
    return TurnNote((-0.1,) * sampled, reasoning, **given)


def rollout(task, notes, success=False, stop="done", sample=0, reward=None):
    reward = float(success) if reward is None else reward
    name = f"toy/{task}/{sample}"
    return Rollout(
        *(name, "toy", task, sample, (), (), reward, success, stop, None, None, tuple(notes))
    )


EPISODES = [
    # 3 turns, 2 of them with reasoning: 4 + 8 tokens.
    rollout("boil/1", [note(10, 4), note(3), note(12, 8)], True),
    # A turn that was cut off within its reasoning, and one without any; 2 things went wrong.
    rollout("boil/2", [note(20, 20, truncated=True, errors=("cut",)), note(5, errors=("x",))]),
    rollout("melt/1", [], stop="env_error"),
    rollout("melt/1", [note(6, 6)], True, sample=1, reward=0.5),
]


def test_every_measure_by_hand():
    found = measure(EPISODES, "all")
    assert (found.episodes, found.tasks, found.successes) == (4, 3, 2)
    assert found.success == 0.5
    assert found.interval == wilson(2, 4)
    assert found.reward == (1 + 0 + 0 + 0.5) / 4
    assert found.reasoning_tokens == (4 + 8 + 20 + 6) / 4
    assert found.skip_ratio == 2 / 6
    assert found.thinking_tokens == (4 + 8 + 20 + 6) / 4
    assert (found.turns, found.sampled_tokens) == (6 / 4, (10 + 3 + 12 + 20 + 5 + 6) / 4)
    assert (found.invalid, found.truncated) == (2 / 4, 1)
    assert found.stops == {"done": 3, "env_error": 1}


def test_kinds_of_tasks_are_what_stands_before_the_number():
    kinds = by_kind(EPISODES)
    assert [(kind.name, kind.episodes, kind.successes) for kind in kinds] == [
        ("boil", 2, 1),
        ("melt", 2, 1),
    ]
    assert by_kind([rollout("7", [])]) == []


def test_nothing_is_measured_as_nothing():
    empty = measure([])
    assert (empty.success, empty.skip_ratio, empty.thinking_tokens, empty.turns) == (0, 0, 0, 0)
    assert empty.interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Ten tries with none: high = z^2 / (n + z^2) = 3.8416 / 13.8416.
    [(0, 10, 0.0, 3.8416 / 13.8416), (10, 10, 10 / 13.8416, 1.0)],
)
def test_wilson_at_the_ends(successes, count, low, high):
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-12)


def test_wilson_holds_the_probabilities_that_the_test_would_not_reject():
    for successes, count in ((1, 3), (19, 20), (250, 400)):
        for bound in wilson(successes, count):
            # Its ends are where the score test is exactly at its limit.
            distance = abs(successes / count - bound) / math.sqrt(bound * (1 - bound) / count)
            assert distance == pytest.approx(1.96, rel=1e-9)


def test_table_and_plot_hold_every_row(tmp_path):
    rows = [measure(EPISODES, "first"), measure([], "[b]second"), measure(EPISODES[:1], "third")]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(measures_table(rows))
    text = captured.get()
    for said in ("first", "[b]second", "50.0 %", "33.3 %", "15.0-85.0"):
        assert said in text
    plot_measures(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no measures"):
        plot_measures([], tmp_path / "plot.png")


def test_names_of_points_at_one_place_do_not_cover_each_other(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    rows = [measure(EPISODES, name) for name in ("one", "two", "$a_{b$")] + [measure([], "far")]
    boxes = {}

    def save(figure, file, **settings):
        figure.draw_without_rendering()
        for text in figure.axes[0].texts:
            boxes[text.get_text()] = text.get_window_extent()

    monkeypatch.setattr(Figure, "savefig", save)
    plot_measures(rows, tmp_path / "plot.png")
    assert sorted(boxes) == sorted(row.name for row in rows)
    for left, right in itertools.combinations(boxes.values(), 2):
        assert not left.overlaps(right)
