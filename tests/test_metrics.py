import json
import sys
import types

import pytest
from matplotlib.figure import Figure

from race_jax import metrics
from race_jax.metrics import (
    NAMES,
    Curve,
    MetricWriter,
    check_trackers,
    is_metrics,
    plot_metrics,
    read_metrics,
)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    """Every scalar in the TensorBoard files, read by tensorboardX's own record format."""
    import struct

    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return found


def test_numbers_go_to_the_file_and_to_tensorboard(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 0.5, "train/tokens": 7})
        writer.write(2, {"train/loss": float("nan")})
    assert lines(tmp_path) == [
        {"step": 1, "train/loss": 0.5, "train/tokens": 7.0},
        {"step": 2, "train/loss": None},
    ]
    assert scalars(tmp_path) == [("train/loss", 1, 0.5), ("train/tokens", 1, 7.0)]


def test_a_run_that_goes_on_takes_back_what_it_wrote_too_far(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": step})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "tra')  # a kill in the middle of a write
    with MetricWriter(tmp_path, step=2) as writer:
        assert [record["step"] for record in writer.earlier] == [1, 2]
        writer.write(3, {"train/loss": 30})
    assert [(r["step"], r["train/loss"]) for r in lines(tmp_path)] == [(1, 1), (2, 2), (3, 30)]


def test_an_unknown_name_is_refused(tmp_path):
    with MetricWriter(tmp_path) as writer, pytest.raises(ValueError, match="train/los"):
        writer.write(1, {"train/los": 0.5})


def test_trackers_get_the_same_numbers(tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType("trackio")
    fake.__spec__ = types.SimpleNamespace()
    fake.init = lambda **kw: calls.append(("init", kw))
    fake.log = lambda values, step: calls.append(("log", values, step))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with MetricWriter(tmp_path, trackers=("trackio",), settings={"a": 1}) as writer:
        writer.write(1, {"train/loss": 0.5})
    assert calls == [
        ("init", {"project": "race-jax", "name": tmp_path.name, "config": {"a": 1}}),
        ("log", {"train/loss": 0.5}, 1),
        ("finish",),
    ]


def test_a_tracker_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'mlflow'; known are wandb, trackio"):
        check_trackers(["mlflow"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_trackers(["wandb"])


def test_curves_come_back_by_name_without_gaps(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 3.0})
        writer.write(2, {"train/loss": float("inf"), "eval/loss": 2.0})
        writer.write(3, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    curves = read_metrics(path)
    assert curves == {"train/loss": ([1, 3], [3.0, 1.0]), "eval/loss": ([2], [2.0])}
    assert set(curves) <= set(NAMES)
    plot_metrics(curves, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_told_from_other_files(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 3.0})
    assert is_metrics(tmp_path / "metrics.jsonl")
    for name, text in (
        ("covers", '{"id": "a", "epsilon": 0.1}\n'),
        ("steps", '{"step": 1}\n'),
        ("text", "train/loss\n"),
        ("empty", ""),
    ):
        (tmp_path / name).write_text(text)
        assert not is_metrics(tmp_path / name)
    assert not is_metrics(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no metrics"):
        read_metrics(tmp_path / "covers")
    with pytest.raises(ValueError, match="no curves"):
        plot_metrics({}, tmp_path / "p.png")


def test_a_run_that_begins_anew_keeps_nothing_and_other_processes_write_nothing(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(0, {"eval/loss": 3.0})
    with MetricWriter(tmp_path) as writer:
        assert writer.earlier == []
        writer.write(0, {"eval/loss": 2.0})
    with MetricWriter(tmp_path / "other", active=False) as writer:
        writer.write(0, {"eval/loss": 9.0})
    assert lines(tmp_path) == [{"step": 0, "eval/loss": 2.0}]
    assert not (tmp_path / "other").exists()


def test_every_curve_lies_within_its_panel(tmp_path, monkeypatch):
    """Log-probabilities leave [0, 1], where only probabilities and shares are confined."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    curves = {}
    for title, panel in metrics._PANELS:
        share = title.startswith(("probability", "share"))
        span = [0.0, 1.0] if share else [0.0 if title in metrics._FROM_ZERO else -7.0, 8.0]
        curves |= {name: Curve([1, 2], span) for name in panel}
    plot_metrics(curves, tmp_path / "curves.png")
    drawn = [axes for axes in figures[0].axes if axes.lines]
    assert len(drawn) == len(metrics._PANELS)
    for axes in drawn:
        low, high = axes.get_ylim()
        for line in axes.lines:
            assert low <= min(line.get_ydata()) and max(line.get_ydata()) <= high


def test_the_axis_of_steps_shows_whole_steps_only(tmp_path, monkeypatch):
    """Two steps have no step 1.2 between them."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    plot_metrics({"train/loss": Curve([1, 2], [0.5, 0.25])}, tmp_path / "curves.png")
    axes = next(axes for axes in figures[0].axes if axes.lines)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1.0, 2.0]
