"""The input pipeline: what is taken, in which order, how it resumes, what it refuses."""

import dataclasses
import io
import json
import shutil
import tracemalloc
from collections import Counter

import jax
import numpy as np
import pytest
from rich.console import Console
from toy import ToyModel

from race_jax import losses
from race_jax.chat import renderer_for
from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.jsonl import dumps
from race_jax.logic.cover import find_cover
from race_jax.logic.records import cover_record, digest_of
from race_jax.logprobs import token_logprobs
from race_jax.sft_cache import make_cache, open_cache
from race_jax.sft_data import DECISION, SftDataConfig, build_pipeline
from race_jax.trajectories import write
from race_jax.types import Trajectory

WORDS = [*"abcdefgh", "think", "look", "well"]
RENDERER = renderer_for(word_tokenizer(WORDS), "qwen3")
CLOSE = RENDERER.end_of_reasoning


def item(number, turns=3, **keys):
    """A trajectory whose length and content follow from its number."""
    messages = [{"role": "user", "content": "abcdefgh"[number % 8] * (1 + number % 5)}]
    for t in range(turns):
        reasoning = "think" * (1 + (number + t) % 4)
        messages.append({"role": "assistant", "content": "go", "reasoning_content": reasoning})
        messages.append({"role": "user", "content": "look"})
    return Trajectory(f"t{number}", tuple(messages), **{"success": True, **keys})


def records(trajectory, epsilons=(0.5,), save_tokens=False):
    """LoGiC's records where an action loses as much as its turn's reasoning is long, in tenths."""
    tokens = RENDERER.encode(trajectory)
    full = tokens.assemble().starts

    def score(sequence):
        lengths = sequence.actions[:, 0] - sequence.starts
        assert len(full) == len(lengths)
        return lengths / 10.0

    for epsilon in epsilons:
        cover = find_cover(tokens, score, epsilon)
        messages = RENDERER.compress(trajectory, cover.removed) if trajectory.messages else []
        record = cover_record(
            cover, tokens, trajectory, messages, noise_floor=1e-6, save_tokens=save_tokens
        )
        yield {**record, "input_id": digest_of(tokens)}


def write_records(path, items, **settings):
    lines = [dumps(record) for trajectory in items for record in records(trajectory, **settings)]
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "raw.jsonl"
    write(path, [item(n) for n in range(40)])
    return path


def build(path, renderer=RENDERER, seed=0, report=lambda line: None, process=(0, 1), **changes):
    settings = {"length": 128, "batch_size": 2, "reasoning": "full", "held_out": 0.0, **changes}
    settings.setdefault("cache", str(path.parent / "cache"))
    return build_pipeline(
        SftDataConfig(str(path), **settings),
        renderer,
        seed=seed,
        vocab_size=len(word_tokenizer(WORDS)),
        process_index=process[0],
        process_count=process[1],
        report=report,
    )


def segments(batch):
    """The token ids of every example in a batch."""
    for tokens, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, ids.max(initial=0) + 1):
            yield tuple(tokens[ids == segment].tolist())


def same(left, right):
    return left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


def one_epoch(pipeline):
    while pipeline.epoch < 1:
        yield next(pipeline)


def test_each_epoch_shows_every_trajectory_once_in_an_order_of_its_own(raw):
    # One row per trajectory, so that a batch ends where an epoch does.
    pipeline = build(raw, pack=False, batch_size=4)
    epochs = []
    for _ in range(3):
        seen = [s for _ in range(10) for s in segments(next(pipeline))]
        epochs.append(seen)
        assert len(set(seen)) == 40
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert pipeline.epoch == 3


def test_packed_rows_hold_the_same_trajectories(raw):
    alone = build(raw, pack=False)
    packed = build(raw)
    assert packed.stats["packing_efficiency"] > 1.5 * alone.stats["packing_efficiency"]
    # Rows of an odd number: two epochs end on the edge of a batch.
    want = Counter(s for _ in range(40) for s in segments(next(alone)))
    got = Counter()
    while sum(got.values()) < 80:
        got.update(segments(next(packed)))
    assert got == want


def test_order_depends_on_the_seed_and_nothing_else(raw):
    first, again, other = build(raw), build(raw), build(raw, seed=1)
    assert same(next(first), next(again))
    assert not same(next(first), next(other))


@pytest.mark.parametrize("stop", [1, 4, 9, 13])
@pytest.mark.parametrize("window", [5, 1024])
def test_resumes_exactly_in_and_across_epochs(raw, stop, window):
    whole = build(raw, window=window)
    for _ in range(stop):
        next(whole)
    state = json.loads(json.dumps(whole.get_state()))
    later = build(raw, window=window)
    later.set_state(state)
    assert later.epoch == whole.epoch
    for _ in range(12):
        assert same(next(later), next(whole))


def test_processes_share_each_batch_and_their_number_may_change(raw):
    whole = build(raw, batch_size=4)
    parts = [build(raw, batch_size=4, process=(n, 2)) for n in range(2)]
    for _ in range(5):
        batch, halves = next(whole), [next(part) for part in parts]
        joined = {k: np.concatenate([half[k] for half in halves]) for k in batch}
        assert same(batch, joined)
    assert parts[0].get_state() == parts[1].get_state() == whole.get_state()
    four = build(raw, batch_size=4, process=(3, 4))
    four.set_state(parts[0].get_state())
    assert same({k: x[3:] for k, x in next(whole).items()}, next(four))


def test_a_state_of_other_data_or_settings_is_refused(raw, tmp_path):
    state = build(raw).get_state()
    with pytest.raises(ValueError, match="seed 0, this run 1"):
        build(raw, seed=1).set_state(state)
    with pytest.raises(ValueError, match="fingerprint"):
        build(raw, reasoning="none").set_state(state)
    other = tmp_path / "other.jsonl"
    write(other, [item(n) for n in range(39)])
    with pytest.raises(ValueError, match="have changed"):
        build(other).set_state(state)
    # The same content under another name is the same data.
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(raw.read_bytes())
    build(copy, cache=str(tmp_path / "elsewhere")).set_state(state)


def test_full_cover_and_none_from_logic_output(tmp_path):
    """Turns of 1, 2, 3, 4 words of reasoning lose 0.2, 0.3, 0.4, 0.5; at 0.35 the second goes."""
    trajectory = item(0, turns=4)
    path = write_records(tmp_path / "covers.jsonl", [trajectory], epsilons=(0.35,))
    for reasoning, want in (("full", []), ("cover", [1]), ("none", [0, 1, 2, 3])):
        pipeline = build(path, reasoning=reasoning, batch_size=1)
        batch = next(pipeline)
        decided = batch["targets"][batch["kinds"] == DECISION]
        assert np.flatnonzero(decided == CLOSE).tolist() == want
        assert pipeline.stats["skip_turns"] == len(want)
        assert pipeline.stats["other_ids"] == 0
        expected = RENDERER.encode(trajectory).assemble(want).tokens
        got = next(segments(batch))
        assert list(got) == expected[: len(got)].tolist()


def test_ids_that_logic_saved_are_trained_on_as_they_are(tmp_path):
    # "l" "ook" as bytes, where the tokenizer would give the one word: what was sampled stays.
    tokens = RENDERER.encode(item(0, turns=2))
    odd = (*b"look", RENDERER.end_of_turn)
    turns = tuple(dataclasses.replace(turn, action=odd) for turn in tokens.turns)
    tokens = dataclasses.replace(tokens, turns=turns)
    trajectory = Trajectory("t0", (), success=True, tokens=tokens)
    path = write_records(tmp_path / "covers.jsonl", [trajectory], save_tokens=True)
    batch = next(build(path, reasoning="cover", batch_size=1))
    expected = tokens.assemble([t for t in range(2) if t and _skips(path, t)]).tokens
    got = next(segments(batch))
    assert list(got) == expected[: len(got)].tolist()
    # Without them the text cannot stand in.
    told = []
    path = write_records(tmp_path / "lost.jsonl", [trajectory])
    with pytest.raises(ValueError, match="leaves no trajectory"):
        build(path, reasoning="cover", report=told.append)
    assert "--save-tokens" in told[0]


def _skips(path, turn):
    return json.loads(path.read_text())["turns"][turn]["decision"] == "SKIP"


def test_ids_other_than_logic_scored_are_counted(tmp_path):
    path = write_records(tmp_path / "covers.jsonl", [item(n) for n in range(3)])
    template = renderer_for(word_tokenizer(WORDS), "qwen3", skip_form="template")
    pipeline = build(path, template, reasoning="cover", batch_size=1)
    assert pipeline.stats["other_ids"] == 3


def test_a_threshold_must_be_named_where_there_are_several(tmp_path):
    path = write_records(
        tmp_path / "sweep.jsonl", [item(n) for n in range(3)], epsilons=(0.0, 0.1, 9.0)
    )
    with pytest.raises(ValueError, match=r"several thresholds; set epsilon to one of 0, 0\.1, 9"):
        build(path, reasoning="cover")
    with pytest.raises(ValueError, match=r"no cover at epsilon 0\.2; it has 0, 0\.1, 9"):
        build(path, reasoning="cover", epsilon=0.2)
    assert build(path, reasoning="cover", epsilon=9.0).stats["skip_turns"] == 6
    assert build(path, reasoning="cover", epsilon=0.0).stats["skip_turns"] < 6
    # All thresholds hold the same trajectories; each counts once.
    assert build(path, reasoning="full").stats["trajectories"] == 3


def test_choices_that_do_not_fit_the_file_are_refused(raw, tmp_path):
    with pytest.raises(ValueError, match="holds trajectories, not LoGiC's output"):
        build(raw, reasoning="cover")
    with pytest.raises(ValueError, match="nothing to choose"):
        build(raw, epsilon=0.001)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no line that can be read"):
        build(tmp_path / "empty.jsonl", reasoning="cover")
    with pytest.raises(ValueError, match="there is no such file"):
        build(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="not a regular file"):
        build(tmp_path)


def test_success_decides_and_unknown_success_has_a_rule(tmp_path):
    path = tmp_path / "mixed.jsonl"
    write(path, [item(n, success=s) for n, s in enumerate([True, False, None, True, None])])
    found = {s: build(path, success=s).stats for s in ("required", "not_failed", "any")}
    assert {s: stats["trajectories"] for s, stats in found.items()} == {
        "required": 2,
        "not_failed": 4,
        "any": 5,
    }
    assert (found["required"]["failed"], found["required"]["unknown"]) == (1, 2)
    assert (found["not_failed"]["failed"], found["not_failed"]["unknown"]) == (1, 0)


def test_nothing_left_says_why(tmp_path):
    path = tmp_path / "failed.jsonl"
    write(path, [item(0, success=False), item(1, success=None)])
    with pytest.raises(ValueError, match=r"1 failed .*; 1 do not say .*not_failed"):
        build(path)
    assert not list((tmp_path / "cache").iterdir())  # nothing half made stays behind


def test_bad_lines_are_told_and_passed_over(tmp_path):
    path = tmp_path / "some.jsonl"
    write(path, [item(0), item(1)])
    path.write_bytes(b"{not json\n" + path.read_bytes() + b'{"id": "x", "messages": []}\n')
    told = []
    assert build(path, report=told.append).stats["faults"] == 2
    assert [line.split(":")[1] for line in told] == ["1", "4"]
    covers = write_records(tmp_path / "covers.jsonl", [item(0)])
    covers.write_bytes(covers.read_bytes() * 2 + raw_line(item(1)))
    told = []
    assert build(covers, reasoning="cover", report=told.append).stats["trajectories"] == 1
    assert "stands twice" in told[0] and "not a record of LoGiC" in told[1]
    # The other way round a compressed trajectory would pass for a whole one.
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_bytes(raw_line(item(1)) + covers.read_bytes().splitlines(True)[0])
    told = []
    assert build(mixed, report=told.append).stats["trajectories"] == 1
    assert "keep the two apart" in told[0]


def raw_line(trajectory):
    return dumps({"id": trajectory.id, "messages": list(trajectory.messages), "success": True})


def test_records_changed_afterwards_are_faults(tmp_path):
    path = write_records(tmp_path / "covers.jsonl", [item(0), item(1)])
    first, second = map(json.loads, path.read_text().splitlines())
    first["original_reasoning"].pop()
    path.write_bytes(dumps(first) + dumps(second))
    told = []
    assert build(path, reasoning="cover", report=told.append).stats["trajectories"] == 1
    assert "was changed" in told[0]


def test_long_trajectories_are_dropped_or_cut_after_a_turn(tmp_path):
    path = tmp_path / "long.jsonl"
    write(path, [item(0, turns=2), item(1, turns=12)])
    example = RENDERER.encode(item(1, turns=12)).assemble()
    ends = example.actions[:, 1]
    length = int(ends[4]) + 1
    dropped = build(path, length=length)
    assert (dropped.stats["dropped"], dropped.stats["cut"]) == (1, 0)
    assert dropped.stats["turns"] == 2
    cut = build(path, length=length, over_long="cut", pack=False)
    assert (cut.stats["dropped"], cut.stats["cut"]) == (0, 1)
    assert cut.stats["turns"] == 2 + 5
    longest = max((s for s in segments(next(cut))), key=len)
    assert list(longest) == example.tokens[: ends[4]].tolist()
    batch = next(build(path, length=length, over_long="cut", pack=False))
    assert cut.stats["policy_tokens"] == batch["loss_mask"].sum()
    assert cut.stats["policy_decision"] == (batch["kinds"] == DECISION).sum() == 7


def test_a_row_shorter_than_the_longest_turn_is_refused(raw):
    with pytest.raises(ValueError, match=r"data\.length 6 is below the longest turn: turn \d of"):
        build(raw, length=6)
    longest = max(t.actions[:, 1][0] for t in (RENDERER.encode(item(n)).assemble() for n in [0]))
    with pytest.raises(ValueError, match=r"all 40 trajectories are longer than a row.* raise it"):
        build(raw, length=int(longest))


def test_held_out_trajectories_are_chosen_by_id_and_never_trained_on(raw, tmp_path):
    pipeline = build(raw, held_out=0.3)
    aside = [s for batch in pipeline.held_out for s in segments(batch)]
    assert len(aside) == pipeline.stats["held_out"] and 4 <= len(aside) <= 20
    assert aside == [s for batch in pipeline.held_out for s in segments(batch)]  # again
    assert len(pipeline.held_out) == len(list(pipeline.held_out))
    assert all(batch["tokens"].shape == (2, 128) for batch in pipeline.held_out)
    trained = {s for batch in one_epoch(pipeline) for s in segments(batch)}
    assert not trained & set(aside)
    # More data moves no trajectory to the other side.
    more = tmp_path / "more.jsonl"
    write(more, [item(n) for n in range(60)])
    later = {s for batch in build(more, held_out=0.3).held_out for s in segments(batch)}
    assert set(aside) <= later
    assert build(raw).held_out is None


def test_the_table_counts_what_the_rows_hold(raw):
    pipeline = build(raw, pack=False, batch_size=40)
    batch, stats = next(pipeline), pipeline.stats
    assert stats["trajectories"] == 40 and stats["turns"] == 120
    assert stats["tokens"] == (batch["segment_ids"] > 0).sum()
    assert stats["policy_tokens"] == batch["loss_mask"].sum()
    assert stats["policy_decision"] == 120
    np.testing.assert_allclose(
        stats["packing_efficiency"], (batch["segment_ids"] > 0).mean(), rtol=1e-6
    )
    shown = io.StringIO()
    Console(width=80, file=shown).print(pipeline.table())
    text = shown.getvalue()
    assert "trained on" in text and "turns without reasoning" in text and "failed" not in text


def test_the_file_is_tokenised_once(raw, monkeypatch):
    first = next(build(raw))
    monkeypatch.setattr("race_jax.sft_data.select", None)
    assert same(first, next(build(raw, batch_size=2)))
    with pytest.raises(TypeError):
        build(raw, reasoning="none")


def test_a_cache_that_is_not_whole_is_refused(raw, tmp_path):
    build(raw)
    (folder,) = (tmp_path / "cache").iterdir()
    data = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(data[:-4])
    with pytest.raises(ValueError, match="not whole; delete it"):
        build(raw)


def test_a_cache_that_another_process_made_first_stays(tmp_path):
    folder = tmp_path / "cache"

    def fill(writer):
        folder.mkdir()
        (folder / "notes.json").write_text("{}")
        return {}

    make_cache(folder, fill)
    assert [path.name for path in tmp_path.rglob("*")] == ["cache", "notes.json"]
    with pytest.raises(ValueError, match="not whole; delete it"):
        open_cache(folder)


def test_a_full_disk_leaves_nothing_behind(raw, tmp_path, monkeypatch):
    def full(self, name, example):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("race_jax.sft_cache.Writer.add", full)
    with pytest.raises(OSError, match="No space left"):
        build(raw)
    assert not list((tmp_path / "cache").iterdir())


def test_packed_and_separate_rows_have_the_same_loss(raw):
    """Through a model that minds every earlier token of its segment."""
    model = ToyModel(vocab_size=len(word_tokenizer(WORDS)))
    params = model.init()

    @jax.jit
    def loss(x):
        hidden = model.forward(params, x["tokens"], x["positions"], x["segment_ids"])
        logprobs = token_logprobs(hidden, model.head(params), x["targets"])
        return losses.sft(logprobs, x["loss_mask"])

    packed = build(raw, batch_size=1, length=512)
    alone = build(raw, batch_size=40, length=64, pack=False)
    got = np.sum([loss(batch) for batch in one_epoch(packed)], axis=0)
    np.testing.assert_allclose(got, loss(next(alone)), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"length": 1}, "length"),
        ({"batch_size": 0}, "batch_size"),
        ({"reasoning": "some"}, "reasoning"),
        ({"success": "yes"}, "success"),
        ({"over_long": "wrap"}, "over_long"),
        ({"held_out": 1.0}, "held_out"),
        ({"window": 0}, "window"),
    ],
)
def test_settings_out_of_range_name_field_and_value(changes, field):
    settings = {"path": "x", "length": 8, "batch_size": 1, "reasoning": "full", **changes}
    with pytest.raises(ValueError, match=rf"data\.{field} is {changes[field]!r}"):
        SftDataConfig(**settings)


def test_what_cannot_be_shared_or_does_not_belong_together_is_refused(raw):
    with pytest.raises(ValueError, match="3 processes"):
        build(raw, process=(0, 3))
    with pytest.raises(ValueError, match="seed is -1"):
        build(raw, seed=-1)
    config = SftDataConfig(str(raw), 128, 2, "full", cache=str(raw.parent / "cache"))
    with pytest.raises(ValueError, match="do not belong together"):
        build_pipeline(config, RENDERER, seed=0, vocab_size=100)


def test_the_real_trajectories(scienceworld_file, qwen_tokenizer, tmp_path):
    renderer = renderer_for(qwen_tokenizer, "qwen3")
    config = SftDataConfig(str(scienceworld_file), 8192, 4, "full", cache=str(tmp_path))
    pipeline = build_pipeline(config, renderer, seed=0, vocab_size=151936)
    stats = pipeline.stats
    assert stats["read"] == 28 and stats["faults"] == 0
    assert stats["packing_efficiency"] > 0.8
    batch = next(pipeline)
    text = qwen_tokenizer.decode(batch["targets"][0][batch["loss_mask"][0]])
    assert text.count("<|im_end|>") == (batch["kinds"][0] == DECISION).sum() > 0
    assert "<|im_start|>" not in text and "<tool_response>" not in text
    none = build_pipeline(
        dataclasses.replace(config, reasoning="none"), renderer, seed=0, vocab_size=151936
    )
    assert none.stats["skip_share"] == 1
    assert none.stats["policy_action"] == stats["policy_action"]
    assert none.stats["policy_reasoning"] == none.stats["turns"]  # the newlines after </think>


def test_memory_holds_a_trajectory_and_not_the_file(tmp_path):
    """Counted: what Python and NumPy allocate; mapped pages are the system's."""
    path = tmp_path / "large.jsonl"
    message = {"role": "assistant", "content": "go", "reasoning_content": "think" * 1200}
    with path.open("wb") as file:
        for n in range(160):
            messages = [{"role": "user", "content": "look" * 1200}, message]
            file.write(dumps({"id": f"t{n}", "messages": messages, "success": True}))
    size = path.stat().st_size
    assert size > 1.5e6
    build(tmp_path / "large.jsonl", length=4096, held_out=0.5)  # imports, caches of pieces
    shutil.rmtree(tmp_path / "cache")
    tracemalloc.start()
    try:
        pipeline = build(path, length=4096)
        for _ in range(10):
            next(pipeline)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pipeline.stats["trajectories"] == 160
    assert peak < size / 2
