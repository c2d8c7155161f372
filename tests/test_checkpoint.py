import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from race_jax.checkpoint import Checkpoints, check_settings


class State(NamedTuple):
    step: Any
    trained: Any
    optimizer: Any


def state_of(value: float, names=("w", "norm")):
    trained = {name: jnp.full((2, 3), value, jnp.float32) for name in names}
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(0.1, mask=lambda p: {n: n == "w" for n in p})
    )
    return State(jnp.int32(value), trained, rule.init(trained))


def shapes(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_is_saved_comes_back_with_its_notes(tmp_path):
    with Checkpoints(tmp_path / "c") as made:
        assert (made.latest, made.best, made.steps) == (None, None, ())
        made.save(3, state_of(3.0), {"settings": {"a": [1, 2]}, "data": {"row": 5}}, loss=0.5)
    with Checkpoints(tmp_path / "c") as found:
        assert found.latest == 3
        assert found.notes(3) == {
            "settings": {"a": [1, 2]},
            "data": {"row": 5},
            "step": 3,
            "loss": 0.5,
        }
        same(found.restore(3, shapes(state_of(0.0))), state_of(3.0))


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: float("nan"), 6: 2.5}
    with Checkpoints(tmp_path / "c", keep=2) as made:
        for step, loss in losses.items():
            made.save(step, state_of(step), {}, loss=loss)
        made.wait()
        assert made.steps == (2, 5, 6)
        assert (made.latest, made.best) == (6, 2)
        assert made.notes(5)["loss"] is None


def test_a_step_that_is_there_is_left_as_it_is(tmp_path):
    with Checkpoints(tmp_path / "c") as made:
        made.save(1, state_of(1.0), {"mark": "first"})
        made.save(1, state_of(2.0), {"mark": "second"})
        made.wait()
        assert made.notes(1)["mark"] == "first"
        same(made.restore(1, shapes(state_of(0.0))), state_of(1.0))


def test_the_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    move = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path / "c") as made:
        state = state_of(1.0)
        for step in (1, 2, 3):
            made.save(step, state, {})
            state = move(state)
        made.wait()
        assert float(made.restore(3, shapes(state)).trained["w"][0, 0]) == 3.0


def test_a_part_can_be_read_by_itself(tmp_path):
    with Checkpoints(tmp_path / "c") as made:
        made.save(1, state_of(1.0), {})
        made.wait()
        part = {"trained": shapes(state_of(0.0)).trained}
        same(made.restore(1, part, partial=True), {"trained": state_of(1.0).trained})
        with pytest.raises(ValueError, match=r"optimizer\.1\.0\.count is not expected"):
            made.restore(1, part)


def test_other_arrays_are_refused_by_name(tmp_path):
    with Checkpoints(tmp_path / "c") as made:
        made.save(1, state_of(1.0), {})
        made.wait()
        with pytest.raises(ValueError, match=r"trained\.bias is missing; .*nu\.bias is missing"):
            made.restore(1, shapes(state_of(0.0, names=("w", "norm", "bias"))))
        other = shapes(state_of(0.0))
        other.trained["w"] = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        with pytest.raises(ValueError, match=r"trained\.w has shape \(2, 3\), not \(3, 2\)"):
            made.restore(1, other)
        with pytest.raises(ValueError, match="no complete checkpoint 7; there: 1"):
            made.restore(7, other)


def test_a_folder_that_cannot_hold_checkpoints_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="no such folder of checkpoints"):
        Checkpoints(tmp_path / "gone", read_only=True)
    assert not (tmp_path / "gone").exists()
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path / "c", keep=0)


_WRITER = """
import sys, jax.numpy as jnp
from race_jax.checkpoint import Checkpoints
made = Checkpoints(sys.argv[1])
made.save(1, {"w": jnp.full(8, 1.0)}, {"mark": 1})
made.wait()
print("first", flush=True)
made.save(2, {"w": jnp.ones((64, 1 << 20))}, {"mark": 2})
made.wait()
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    folder = tmp_path / "c"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"first\n"
    deadline = time.monotonic() + 60
    while not [p for p in folder.iterdir() if p.name.startswith("2")]:
        assert time.monotonic() < deadline, "the second save never began"
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    begun = [p.name for p in folder.iterdir() if p.name.startswith("2")]
    assert begun and "2" not in begun, "the second save was complete before the kill"
    with Checkpoints(folder) as found:
        assert found.steps == (1,)
        like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
        same(found.restore(1, like), {"w": np.ones(8, np.float32)})
        found.save(2, {"w": jnp.full(8, 2.0)}, {"mark": 3})
        found.wait()
        assert found.notes(2)["mark"] == 3


_FULL = """
import resource, sys, numpy as np
from race_jax.checkpoint import Checkpoints
with Checkpoints(sys.argv[1]) as made:
    made.save(1, {"w": np.ones(8, np.float32)}, {})
    made.wait()
    # No file may grow further: each write fails as on a disk without room.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        made.save(2, {"w": np.random.default_rng(0).normal(size=1 << 18)}, {})
        made.wait()
    except OSError as error:
        print(error)
"""


def test_a_write_that_fails_is_told_once_and_the_one_before_is_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "could not be written" in line and "File too large" in line
    assert "checkpoint 1 is whole" in line and "Free space" in line
    with Checkpoints(tmp_path / "c") as found:
        assert found.steps == (1,)


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "c") as made:
        made.save(1, state_of(1.0), {})
        usage = shutil.disk_usage(tmp_path)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state_of(2.0)))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size // 2))
        with pytest.raises(OSError, match=r"No space left: it takes 0\.0 MiB.*1 is whole"):
            made.save(2, state_of(2.0), {})
        assert sorted(p.name for p in made.folder.iterdir()) == ["1"]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
        made.save(2, state_of(2.0), {})
    assert made.steps == (1, 2)


def test_settings_are_compared_field_by_field():
    saved = {"lr": 1.0, "data": {"path": "a", "sizes": [1, 2]}, "mesh": {"fsdp": 1}}
    check_settings(
        saved,
        {"lr": 1.0, "data": {"path": "a", "sizes": (1, 2)}, "mesh": {"fsdp": 8}},
        "here",
        free=("mesh",),
    )
    with pytest.raises(ValueError, match="here holds a run with other settings") as told:
        check_settings(
            saved,
            {"lr": 2.0, "data": {"path": "a"}, "mesh": {"fsdp": 1}, "new": 0},
            "here",
            free=("mesh",),
        )
    for part in (
        "lr was 1.0 and is now 2.0",
        "data.sizes was [1, 2] and is now '<not set>'",
        "new was '<not set>' and is now 0",
    ):
        assert part in str(told.value)
    assert "path" not in str(told.value)


def test_a_free_name_frees_its_group_and_nothing_that_begins_alike():
    with pytest.raises(ValueError, match=r"mesh_size was 1 and is now 2"):
        check_settings({"mesh_size": 1}, {"mesh_size": 2}, "here", free=("mesh",))


def test_of_many_settings_that_differ_the_first_are_named():
    saved = {f"s{n}": n for n in range(12)}
    with pytest.raises(ValueError, match=r"s0 was 0 and is now -1; .*s7 was 7.*; and 4 more\."):
        check_settings(saved, dict.fromkeys(saved, -1), "here")
    with pytest.raises(ValueError, match="s8") as all_named:
        check_settings(saved, {**saved, "s8": -1}, "here")
    assert "more" not in str(all_named.value)
