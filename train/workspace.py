"""A folder in which work is done in stages, each once: `quickstart`'s, and each of `reproduce`'s.

What a stage made stays, and is made again only when what decides it has changed. A stage that was
cut short finds what it left, so work that can go on does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from race_jax import jsonl
from race_jax.settings import differing_settings
from race_jax.train.progress import duration
from race_jax.train.runtime import check_folder, make_folder


class Workspace:
    """The folder, and which stages are begun and done in it under which settings.

    Attributes:
        path: The folder.
        console: Where progress is shown.
        begun: By stage, the settings under which it last began.
        done: The same of stages that are finished.
    """

    def __init__(self, path: str | Path, console: Console, *, notes: str, guarded: Sequence[str]):
        """Open or make the folder.

        Args:
            path: The folder.
            console: Where to show progress.
            notes: Name of the file in it that says what is done.
            guarded: Names that the work will take. Where such a file stands and no notes do, the
                folder is another's.

        Raises:
            ValueError: The path is a file, or the folder holds files that are another's.
        """
        self.path, self.console = Path(path), console
        self.notes = self.path / notes
        check_folder(self.path)
        self.begun: dict[str, Any] = {}
        self.done: dict[str, Any] = {}
        if self.notes.is_file():
            # Notes that cannot be read count for nothing: then every stage runs again.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(self.notes.read_text(encoding="utf-8"))
                self.begun, self.done = dict(told["begun"]), dict(told["done"])
            return
        for name in guarded:
            if (self.path / name).exists():
                raise ValueError(
                    f"--out {path} holds {name}, which is of no earlier run; name another folder"
                )
        make_folder(self.path)
        self._save()

    def __getitem__(self, name: str) -> str:
        """The path of a file or folder in the workspace."""
        return str(self.path / name)

    def forget(self) -> None:
        """Take every stage for never begun."""
        self.begun, self.done = {}, {}
        self._save()

    def stage(
        self,
        title: str,
        settings: Mapping[str, Any],
        made: Sequence[str],
        work: Callable[[], None],
        *,
        unfinished: str | None = None,
    ) -> None:
        """Do a stage, unless what it makes is there and was made under the same settings.

        Args:
            title: Says what the stage does; shown, and the name under which it is remembered.
            settings: All that decides the result, ready for JSON.
            made: Names of what the stage makes.
            work: Does it.
            unfinished: File or folder from which `work` goes on when it was cut short. It is
                removed first if it is of other settings.
        """
        version = {"race-jax": importlib.metadata.version("race-jax")}
        now = json.loads(json.dumps({**settings, **version}))
        there = all((self.path / name).exists() for name in made)
        before = self.done.get(title)
        if there and before == now:
            self.console.print(f"[bold]{title}[/]: done in an earlier run, kept")
            return
        if there and isinstance(before, Mapping):
            told = "; ".join(differing_settings(before, now))
            self.console.print(f"{title}: made under other settings before ({told}), done again")
        self.console.print(f"[bold]{title}[/] ...")
        clock = time.monotonic()
        if unfinished is not None and self.begun.get(title) != now:
            _remove(self.path / unfinished)
        self.done.pop(title, None)
        self.begun[title] = now
        self._save()
        work()
        self.done[title] = now
        self._save()
        self.console.print(f"[bold]{title}[/]: {duration(time.monotonic() - clock)} min")

    def _save(self) -> None:
        with jsonl.replacing(self.notes) as file:
            file.write(json.dumps({"begun": self.begun, "done": self.done}, indent=1).encode())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest_of(path: str | Path) -> str:
    """A short name for a file's content: 16 hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
