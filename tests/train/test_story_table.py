import dataclasses

import pytest
from rich.console import Console

from race_jax.train.story_table import count_covers, cover_table


def record(name, epsilon, decisions):
    turns = [
        {"decision": decision, "tested": t > 0, "reasoning_tokens": tokens}
        for t, (decision, tokens) in enumerate(decisions)
    ]
    return {"id": name, "epsilon": epsilon, "turns": turns}


RECORDS = [
    record("a", 0.1, [("THINK", 7), ("SKIP", 5), ("THINK", 7), ("THINK", 5)]),
    record("b", 0.1, [("THINK", 7), ("SKIP", 7), ("THINK", 6)]),
    record("a", 0.5, [("THINK", 7), ("SKIP", 5), ("SKIP", 7), ("SKIP", 5)]),
    record("b", 0.5, [("THINK", 7), ("SKIP", 7), ("SKIP", 6)]),
]
NEEDED = {"a": [True, False, True, False], "b": [True, True, True]}


def text_of(table):
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as capture:
        Console(width=120, file=None)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_counts_tested_turns_by_hand():
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text_of(cover_table(RECORDS, NEEDED)).splitlines()
        if "%" in line
    ]
    # 0.1: 2 of 7 turns skipped; 12 of 44 tokens; tested needed turns: a3, b2, b3, of which a3 and
    # b3 are kept; kept tested turns: a3, a4, b3.
    assert rows[0] == ["0.1", "28.6%", "27.3%", "66.7%", "66.7%"]
    # 0.5: nothing tested is kept: 30 of 44 tokens saved, precision of nothing is no number.
    assert rows[1] == ["0.5", "71.4%", "68.2%", "0.0%", "-"]


def test_counts_stand_behind_the_shares():
    first, second = count_covers(RECORDS, NEEDED)
    assert dataclasses.astuple(first) == (0.1, 7, 2, 44, 32, 3, 3, 2)
    assert dataclasses.astuple(second) == (0.5, 7, 5, 44, 14, 3, 0, 0)
    assert first.recall == first.precision == pytest.approx(2 / 3)
    assert second.recall == 0 and second.precision is None
