import json

import pytest

from race_jax.train.trajectories_cli import check, convert
from race_jax.trajectories import read

TURN = {"role": "assistant", "content": "go", "reasoning_content": "Hm."}
GOOD = {
    "id": "a",
    "messages": [
        {"role": "user", "content": "q"},
        TURN,
        {"role": "user", "content": "o"},
        TURN | {"reasoning_content": ""},
    ],
    "success": True,
}
TOKENS = {
    "id": "t",
    "tokens": {"prompt": [1], "turns": [{"reasoning": [2], "action": [3]}]},
    "success": False,
}


def save(path, *records):
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return str(path)


def test_check_a_good_file(tmp_path, capsys):
    talk = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "OK", "loss": False},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "Thought: a\nAction: b"},
    ]
    unknown = {"id": "u", "conversations": talk}
    assert check(save(tmp_path / "x", GOOD, TOKENS, unknown)) == 0
    # Turns: 2 + 1 + 1, of which 1 + 1 + 1 reason; the canned reply is no turn.
    assert capsys.readouterr().out.splitlines() == [
        "trajectories    3",
        "turns           4 (1.3 per trajectory)",
        "with reasoning  3 (75.0 %)",
        "success         1 of 2 known (50.0 %)",
        "forms           conversations 1, messages 1, tokens 1",
        "faults          0",
    ]


def test_check_names_line_and_rule(tmp_path, capsys):
    file = save(tmp_path / "x", GOOD, "{", GOOD | {"reward": "x", "success": 1})
    assert check(file) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{file}:2: json: ")
    assert out[1] == f"{file}:3: duplicate-id: id 'a' stands on line 1 already"
    assert out[2].startswith(f"{file}:3: reward: ")
    assert out[3].startswith(f"{file}:3: success: ")
    assert out[4] == "trajectories    1"
    assert out[-1] == "faults          4 on 2 lines"


@pytest.mark.parametrize(("limit", "shown"), [(0, 0), (3, 3), (4, 4), (9, 4)])
def test_check_prints_so_many_faults(tmp_path, capsys, limit, shown):
    file = save(tmp_path / "x", "{", GOOD | {"reward": "x", "success": 1}, "[]")
    assert check(file, limit) == 1
    out = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(file) for line in out) == shown
    assert (f"... and {4 - shown} more faults" in out) == (shown < 4)
    assert out[-1] == "faults          4 on 3 lines"


def test_check_an_empty_file(tmp_path, capsys):
    file = save(tmp_path / "x")
    assert check(file) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{file}:1: empty-file: the file has no line with a trajectory"
    assert "turns           0" in out


def test_unreadable(tmp_path, capsys):
    for run in (check, lambda file: convert(file, str(tmp_path / "out"))):
        assert run(str(tmp_path / "none")) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "none" in captured.err and "No such file" in captured.err
    assert not (tmp_path / "out").exists()


def test_negative_limit(tmp_path):
    file = save(tmp_path / "x", GOOD)
    for run in (check, lambda file, n: convert(file, file, n)):
        with pytest.raises(ValueError, match="limit_faults is -1"):
            run(file, -1)


def test_convert_keeps_the_good_lines(tmp_path, capsys):
    file, out = save(tmp_path / "x", GOOD, "{", TOKENS), str(tmp_path / "out")
    assert convert(file, out) == 1
    captured = capsys.readouterr()
    assert captured.out == f"2 trajectories written to {out}, 1 lines left out\n"
    assert captured.err.startswith(f"{file}:2: json: ")
    assert [item.id for item in read(out)] == ["a", "t"]
    # In place, and now without faults.
    assert convert(out, out) == 0
    assert check(out) == 0


def test_convert_leaves_the_old_file_if_nothing_is_good(tmp_path, capsys):
    file, out = save(tmp_path / "x", "{"), tmp_path / "out"
    out.write_text("old")
    assert convert(file, str(out)) == 1
    assert out.read_text() == "old"
    assert "no trajectory to convert" in capsys.readouterr().err


def test_convert_to_a_missing_folder(tmp_path, capsys):
    out = str(tmp_path / "no" / "out")
    assert convert(save(tmp_path / "x", GOOD), out) == 2
    assert out in capsys.readouterr().err
