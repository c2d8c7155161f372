"""Parts of the page by hand: sentences, numbers, clipped texts, heat maps and the curve."""

import math
import random

import pytest
from report_samples import make_record, make_turn

from race_jax.report import summarise
from race_jax.report_page import curve
from race_jax.report_view import clip, heat_map, heat_steps, number, shade, verdict


@pytest.mark.parametrize(
    ("turn", "index", "said"),
    [
        (make_turn(1, "THINK"), 1, "Kept: the first turn always is."),
        (make_turn(4, "THINK"), 4, "Kept: its removal was not tested."),
        (make_turn(4, "SKIP", 0), 4, "No reasoning: the turn came without any, so nothing was"),
        (
            make_turn(4, "THINK", tested=True, max_decrease=0.41, worst_turn=7),
            4,
            "Kept: without this reasoning the action of [7] would lose 0.41 nats per token (410 ε",
        ),
        (
            make_turn(4, "THINK", tested=True, max_decrease=0.41, worst_turn=4),
            4,
            "Kept: without this reasoning this turn’s own action would lose 0.41 nats",
        ),
        (
            make_turn(4, "THINK", tested=True, max_decrease=0.0010002, worst_turn=4),
            4,
            "would lose 0.0010002 nats per token (1 ε)",
        ),
        (make_turn(4, "THINK", tested=True), 4, "an action would lose more than ε."),
        (
            make_turn(4, "SKIP", tested=True, max_decrease=0.0004, worst_turn=9),
            4,
            "no action from here on loses more than 0.0004 nats per token (the most: [9]).",
        ),
        (
            make_turn(4, "SKIP", tested=True, max_decrease=-0.2, worst_turn=9),
            4,
            "Removed: no action from here on becomes less likely.",
        ),
    ],
)
def test_verdicts(turn, index, said):
    parts = verdict(turn, index, 0.001)
    link = "" if parts["link"] is None else f"[{parts['link']}]"
    assert said in f"{parts['lead']}: {parts['before']}{link}{parts['after']}"


def test_heat_map_cells_by_hand():
    record = make_record(decreases={"3": [0.41], "2": [-0.002, None]})
    heat = heat_map(0, record)
    first, second = heat["rows"]
    assert (first["turn"], first["keep"]) == (2, False)
    assert first["cells"] == (
        '<td colspan="1" class="z"></td><td class="a">−0.002</td><td class="n"></td>'
    )
    assert second["cells"] == '<td colspan="2" class="z"></td><td class="e w">0.41</td>'
    # A row that ends early is as good as one that says null.
    record["decreases"]["2"] = [-0.002]
    assert heat_map(0, record)["rows"][0]["cells"] == first["cells"]


def test_shades_change_at_the_threshold():
    steps = heat_steps(0.001)
    assert steps == pytest.approx([0.001, 0.01, 0.1, 1.0])
    values = [-1.0, 0.0, 1e-9, 0.001, 0.0010001, 0.05, 1.0, 1.1, math.inf, None]
    assert "".join(shade(value, steps) for value in values) == "aabbcdeffn"
    assert heat_steps(0.1) == pytest.approx([0.1, 0.3, 0.9, 2.7])
    assert "".join(shade(v, heat_steps(0.0)) for v in (0.0, 1e-12, 5.0)) == "acf"


def test_clip_loses_nothing():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab \n") for _ in range(rng.randrange(400)))
        head, rest = clip(text, 100, 4)
        assert head + rest == text
        if rest:
            assert len(head) <= 100 and head.count("\n") < 4
    assert clip("x" * 5000, 100, 4) == ("x" * 100, "x" * 4900)


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        *[
            (0.412, 3, "0.412"),
            (-0.0123, 3, "−0.0123"),
            (0.00104, 3, "0.00104"),
            (0.001, 3, "0.001"),
        ],
        *[(4.12e-5, 3, "4.1e−5"), (999.7, 3, "1000"), (12345.6, 3, "12346"), (0.0, 3, "0")],
        *[
            (0.00041, 2, "4e−4"),
            (1e-5, 6, "1e−5"),
            (0.0012345, 6, "0.0012345"),
            (1e300, 3, "1e300"),
        ],
        *[(None, 3, "–"), (math.inf, 3, "∞"), (-math.inf, 3, "−∞"), (math.nan, 3, "not a number")],
    ],
)
def test_numbers_for_people(value, digits, said):
    assert number(value, digits) == said


def test_curve_is_logarithmic():
    records = [make_record(epsilon=e) for e in (0.001, 0.01, 0.1)]
    drawn = curve(summarise(records))
    assert drawn is not None
    xs = [point["x"] for point in drawn["points"]]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    span = drawn["bottom"] - drawn["top"]
    assert drawn["points"][0]["skip"] == pytest.approx(drawn["bottom"] - span / 3, abs=0.06)
    assert [label for _, label in drawn["ticks"]] == ["0.001", "0.01", "0.1"]
    zero = curve(summarise([make_record(epsilon=e) for e in (0.0, 0.01, 0.1)]))
    assert zero is not None and zero["ticks"][0][1] == "0"
    assert zero["points"][0]["x"] < zero["points"][1]["x"]
    assert curve(summarise(records[:1])) is None
    assert curve(summarise([make_record(epsilon=0.0)])) is None
