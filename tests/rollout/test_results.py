"""Rollouts in files, and the other commands that read them."""

import json

import pytest
from rollout_samples import ScriptedSampler, potion_oracle, turn_ids, word_renderer

from race_jax.envs.potions import PotionShop
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import Runner
from race_jax.rollout.results import OtherSettings, Rollout, RolloutFile, gather, read_rollouts
from race_jax.train.trajectories_cli import check
from race_jax.trajectories import read
from race_jax.types import Trajectory


@pytest.fixture(scope="module")
def rollouts():
    words = word_renderer()
    oracle = potion_oracle(words)

    def script(request, turn):
        if request.conversation == "potions/2/0":
            return words.codec.encode("I do not know") if turn else turn_ids(words, ("fly", {}))
        return oracle(request, turn)

    runner = Runner(
        ScriptedSampler(script), words, LocalHost(PotionShop), RolloutConfig(max_turn_tokens=200)
    )
    return list(runner.run([Job("potions", str(task), 0) for task in range(3)]))


def without_a_turn():
    return Rollout(
        *("potions/9/0", "potions", "9", 0, (), (), 0.0, False, "env_error"),
        *("it is down", None, ()),
    )


def test_a_file_of_rollouts_is_a_file_of_trajectories(rollouts, tmp_path):
    path = tmp_path / "out.jsonl"
    with RolloutFile(path, {"a": 1}) as file:
        for rollout in rollouts:
            file.append(rollout)
    assert check(str(path)) == 0
    found = list(read(path, strict=True))
    assert all(isinstance(item, Trajectory) for item in found)
    assert {t.id: t.tokens for t in found} == {r.id: r.tokens for r in rollouts}
    assert {t.id: t.success for t in found} == {r.id: r.success for r in rollouts}
    by_id = {r.id: r for r in read_rollouts(path)}
    assert {r.id: r.notes for r in rollouts} == {name: r.notes for name, r in by_id.items()}
    assert by_id["potions/2/0"].stop == "invalid_calls"


def test_a_rollout_without_a_turn_stands_beside_and_is_run_again(rollouts, tmp_path):
    path = tmp_path / "out.jsonl"
    with RolloutFile(path, {}) as file:
        file.append(rollouts[0])
        file.append(without_a_turn())
        file.append(without_a_turn())
    assert check(str(path)) == 0
    failed = tmp_path / "out.failed.jsonl"
    assert len(failed.read_text().splitlines()) == 2
    assert [r.id for r in read_rollouts(path)] == [rollouts[0].id, "potions/9/0"]
    with RolloutFile(path, {}) as file:
        assert file.done == {rollouts[0].id}
        made = Rollout(**{**vars(rollouts[1]), "id": "potions/9/0"})
        file.append(made)
    assert [r.stop for r in read_rollouts(path)] == [rollouts[0].stop, made.stop]


def test_files_under_other_settings_or_of_another_kind_are_refused(rollouts, tmp_path):
    path = tmp_path / "out.jsonl"
    with RolloutFile(path, {"seed": 0}) as file:
        file.append(rollouts[0])
    before = path.read_bytes()
    with pytest.raises(OtherSettings, match=r"other settings \(seed was 0 and is now 1\)"):
        RolloutFile(path, {"seed": 1})
    assert path.read_bytes() == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "x", "messages": []}\n')
    with pytest.raises(ValueError, match="line 1 is no rollout"):
        RolloutFile(other, {})
    with pytest.raises(ValueError, match="line 1: the record 'x' is no rollout"):
        list(read_rollouts(other))


def test_settings_stand_in_the_first_record_and_files_without_them_are_read_too(rollouts, tmp_path):
    path, settings = tmp_path / "out.jsonl", {"env": {"size": (1, 2)}, "seed": 0}
    with RolloutFile(path, settings) as file:
        file.append(without_a_turn())
        file.append(rollouts[0])
        file.append(rollouts[1])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["rollout"]["made_under"] == {"env": {"size": [1, 2]}, "seed": 0}
    assert "made_under" not in second["rollout"]
    with RolloutFile(path, settings) as file:
        assert len(file.done) == 2
    with pytest.raises(OtherSettings, match=r"\(env.size was \[1, 2\] and is now \[3\]\)"):
        RolloutFile(path, {"env": {"size": (3,)}, "seed": 0})
    del first["rollout"]["made_under"]
    path.write_text(json.dumps(first) + "\n")
    with RolloutFile(path, settings) as file:
        assert len(file.done) == 1
    with pytest.raises(OtherSettings, match="which ones it does not say"):
        RolloutFile(path, {})
    assert len(list(read_rollouts(path))) == 2


def test_a_torn_line_is_run_again(rollouts, tmp_path):
    path = tmp_path / "out.jsonl"
    with RolloutFile(path, {}) as file:
        file.append(rollouts[0])
        file.append(rollouts[1])
    path.write_bytes(path.read_bytes()[:-100])
    with RolloutFile(path, {}) as file:
        assert file.done == {rollouts[0].id}


def test_records_that_lack_a_part_are_named(rollouts):
    record = json.loads(json.dumps(rollouts[0].record()))
    del record["rollout"]["turns"][0]["logprobs"]
    with pytest.raises(ValueError, match="'logprobs'"):
        Rollout.from_record(record)
    record = json.loads(json.dumps(rollouts[0].record()))
    record["rollout"]["turns"].pop()
    with pytest.raises(ValueError, match="not on all"):
        Rollout.from_record(record)


def test_lines_of_another_form_are_named(rollouts, tmp_path):
    path, record = tmp_path / "rollouts.jsonl", rollouts[0].record()
    for line, message in (
        ([1], "line 1: the record is .1., no rollout"),
        (None, "line 1: the record is None, no rollout"),
        ({**record, "rollout": {**record["rollout"], "turns": None}}, "has the turns None"),
        ({"step": 1}, "line 1: the record is no rollout: .*race-jax evaluate, rl and carl"),
        ({**record, "rollout": {**record["rollout"], "fork": "abc"}}, "its fork is 'abc'"),
        ({**record, "rollout": {**record["rollout"], "fork": [0, -1]}}, "at least 0"),
    ):
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(ValueError, match=message):
            list(read_rollouts(path))
    path.write_text(json.dumps(record)[:-9])
    with pytest.raises(ValueError, match=r"line 1: not valid JSON: .* one whole object"):
        list(read_rollouts(path))


def test_groups_come_when_complete_and_incomplete_ones_at_the_end(rollouts):
    def sample(task, n):
        return Rollout(**{**vars(rollouts[0]), "task": task, "sample": n})

    stream = [sample("a", 1), sample("b", 0), sample("a", 0), without_a_turn()]
    groups = list(gather(stream, 2))
    assert [(g.task, [r.sample for r in g.rollouts]) for g in groups] == [
        ("a", [0, 1]),
        ("b", [0]),
        ("9", [0]),
    ]
    assert [len(group.usable) for group in groups] == [2, 1, 0]
