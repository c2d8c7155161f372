import pytest
from rich.console import Console

from race_jax.train.workspace import Workspace


def open_(folder, guarded=("result",), console=None):
    return Workspace(folder, console or Console(), notes="notes.json", guarded=guarded)


class Work:
    """A stage's work, which notes what it found and leaves one file."""

    def __init__(self, folder, cut=False):
        self.folder, self.cut, self.found = folder, cut, []

    def __call__(self):
        half, whole = self.folder / "half", self.folder / "result"
        self.found.append(half.exists())
        half.touch()
        if self.cut:
            raise KeyboardInterrupt
        whole.touch()


def run(folder, work, **settings):
    open_(folder).stage("a", settings, ("result",), work, unfinished="half")


def test_a_finished_stage_is_kept_under_the_same_settings_only(tmp_path):
    work = Work(tmp_path)
    run(tmp_path, work, x=1)
    run(tmp_path, work, x=1)
    assert work.found == [False]
    run(tmp_path, work, x=2)
    # What the other settings left was removed first.
    assert work.found == [False, False]
    (tmp_path / "result").unlink()
    run(tmp_path, work, x=2)
    assert work.found == [False, False, True]


def test_a_stage_that_was_cut_short_finds_what_it_left(tmp_path):
    for cut in (True, True, False):
        work = Work(tmp_path, cut)
        if cut:
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, work, x=1)
        else:
            run(tmp_path, work, x=1)
    assert work.found == [True]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, other := Work(tmp_path, cut=True), x=2)
    assert other.found == [False]


def test_forgotten_stages_run_again(tmp_path):
    work = Work(tmp_path)
    run(tmp_path, work, x=1)
    open_(tmp_path).forget()
    run(tmp_path, work, x=1)
    assert work.found == [False, False]


@pytest.mark.parametrize(
    "notes", ['{"begun": {"a', "", "[1]", "null", '{"a": "b"}', '{"begun": 1, "done": {}}']
)
def test_notes_that_cannot_be_read_count_for_nothing(tmp_path, notes):
    work = Work(tmp_path)
    run(tmp_path, work, x=1)
    (tmp_path / "notes.json").write_text(notes)
    run(tmp_path, work, x=1)
    assert len(work.found) == 2


def test_files_of_another_are_left_alone(tmp_path):
    (tmp_path / "result").write_text("mine")
    with pytest.raises(ValueError, match="holds result, which is of no earlier run"):
        open_(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    with pytest.raises(ValueError, match="is a file; name a folder"):
        open_(tmp_path / "result")


def test_settings_that_changed_are_named(tmp_path, capsys):
    work = Work(tmp_path)
    run(tmp_path, work, x=1, y={"z": (1, 2)})
    run(tmp_path, work, x=1, y={"z": [1, 2]})
    assert "kept" in capsys.readouterr().out
    run(tmp_path, work, x=2, y={"z": [1, 2]})
    said = " ".join(capsys.readouterr().out.split())
    assert "other settings before (x was 1 and is now 2), done again" in said
