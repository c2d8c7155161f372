"""JSON lines on disk: bounded reading, strict parsing, atomic files and append-only logs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

try:
    import fcntl
except ImportError:  # No advisory locks outside POSIX.
    fcntl = None

MAX_LINE_BYTES = 1 << 28
"""The longest line that is read, in bytes; longer ones are passed over without being held."""

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Text that is not strict JSON; `rule` is `utf8` or `json`."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Parsed(NamedTuple):
    """A JSON value and what its text had that Python's value hides.

    Attributes:
        value: The value.
        repeated: A key that one object held twice, or None. Only the last of its values is kept.
        nonfinite: How many numbers are NaN or infinite, which JSON does not have.
    """

    value: Any
    repeated: str | None
    nonfinite: int


def lines(path: str | Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    r"""Read a file line by line in bounded memory.

    Only `\n` ends a line, so that U+2028, which JSON allows inside strings, does not. A byte order
    mark at the start of a line, as joined files have it, is dropped.

    Args:
        path: The file.
        max_bytes: The longest line to hold, its newline included.

    Yields:
        The line's number from 1, and its bytes with the newline, or None when it is too long.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) <= max_bytes:
                yield number, line.removeprefix(_BOM)
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(_SKIP_BYTES)
            yield number, None


def first_object(path: str | Path) -> dict[str, Any]:
    """The first line that is not blank, if the file is there and it is an object; else {}."""
    first = (line for _, line in lines(path) if line is None or line.strip())
    try:
        value = loads(next(first, None) or b"").value if Path(path).is_file() else None
    except JsonError:
        value = None
    return value if isinstance(value, dict) else {}


def loads(text: bytes | str) -> Parsed:
    """Parse JSON strictly enough that what is read can be written again.

    Args:
        text: One JSON value; bytes are UTF-8.

    Returns:
        The value, and notes on repeated keys and numbers that are not finite.

    Raises:
        JsonError: Invalid UTF-8 or JSON, or half of a surrogate pair in a string.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = text[error.start]
            message = f"byte {error.start + 1} of the line (0x{byte:02x}) is not valid UTF-8"
            raise JsonError("utf8", f"{message}: {error.reason}; save the file as UTF-8") from None
    repeated: list[str] = []
    nonfinite: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(items)
        if len(record) < len(items):
            keys = [key for key, _ in items]
            repeated.append(next(key for key in keys if keys.count(key) > 1))
        return record

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            nonfinite.append(digits)
        return value

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=number)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg} at column {error.colno}"
        raise JsonError("json", f"{message}; each line must be one whole object") from None
    except RecursionError:
        raise JsonError("json", "not usable JSON: nested too deeply") from None
    except ValueError as error:  # An integer of more digits than Python converts.
        raise JsonError("json", f"not usable JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            message = r"a string holds half of a surrogate pair (a lone \ud800 to \udfff escape)"
            raise JsonError("utf8", f"{message}, which is no character") from None
    return Parsed(value, repeated[0] if repeated else None, len(nonfinite))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def dumps(record: Mapping[str, Any]) -> bytes:
    """Serialise a record as one line of UTF-8 JSON, newline included.

    Args:
        record: Mappings, lists, strings, finite numbers, bools and None; NumPy values are turned
            into plain ones.

    Raises:
        ValueError: A value has no JSON form: NaN, infinity, half of a surrogate pair, any object.
    """
    try:
        text = json.dumps(dict(record), ensure_ascii=False, allow_nan=False, default=_plain)
        return text.encode("utf-8") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        name = repr(record["id"]) if "id" in record else "without id"
        raise ValueError(f"record {name} cannot be written as JSON: {error}") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name and rename it once it is whole and on disk.

    Args:
        path: The file to make or replace. Until the block ends well it stays as it was.

    Yields:
        A binary file to write to.

    Raises:
        ValueError: The path is there and is not a regular file.
        OSError: The file cannot be written.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"{path} is not a regular file, so it cannot be replaced; name another")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a new name in `folder` last; file systems that cannot are left as they are."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def same_file(left: str | Path, right: str | Path) -> bool:
    """Whether two paths name one file that is there, through links too."""
    return Path(left).exists() and Path(right).exists() and Path(left).samefile(right)


class JsonlLog:
    """An append-only file of JSON records that a killed run can continue.

    Each record is on disk when `append` returns. Opening repairs the one line that a kill in the
    middle of a write can leave torn. The file is locked against a second writer until `close`;
    the system drops the lock when the process ends, however it ends, so a lock is never stale.
    Readers are not held back.

    Attributes:
        path: The file.
        dropped_bytes: Length of the torn last line that opening cut off, 0 if there was none.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        owns: Callable[[Any], bool] = lambda value: isinstance(value, dict),
    ) -> None:
        """Open the file for appending, making it if it is not there.

        Args:
            path: The file.
            owns: Whether the first line's value is a record of this log; a file that begins with
                anything else is refused before a byte of it is mended.

        Raises:
            ValueError: Another process writes the file, or it is not a file of JSON records.
            OSError: The file cannot be opened.
        """
        self.path = Path(path)
        self._owns = owns
        self.dropped_bytes = 0
        fresh = not self.path.exists()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self._repair()
        except BaseException:
            self.close()
            raise
        if fresh:
            _sync_folder(self.path.resolve().parent)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is being written by another process; wait until it ends, "
                "or write to another file"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{self.path} cannot be locked here ({error.strerror}); make sure that no other "
                "process writes it",
                stacklevel=3,
            )

    def _repair(self) -> None:
        """Cut off a torn last line, or end a whole one that lacks only its newline."""
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a regular file: not a log; name another")
        size = status.st_size
        start = self._last_line(size)
        if size - start > MAX_LINE_BYTES:
            raise ValueError(f"{self.path} ends in no line of a log; name another")
        with open(self.path, "rb") as file:
            first = file.readline(MAX_LINE_BYTES)
            file.seek(start)
            tail = file.read()
        # Cutting the end off a file that is something else would destroy it.
        if start > 0 and not isinstance(_object(first), dict):
            raise ValueError(f"{self.path}, line 1 is not a JSON object: not a log; name another")
        if not tail:
            return
        whole = isinstance(_object(tail), dict)
        if (start > 0 or whole) and not self._owns(_object(first)):
            raise ValueError(
                f"{self.path} is not a log of this kind, and its end is torn; nothing was changed: "
                "name another file"
            )
        if whole:
            self._write(b"\n")
        # A file system may leave zeros where the last write never reached the disk.
        elif tail.startswith(b"{") or not tail.strip(b"\0"):
            os.ftruncate(self._descriptor, start)
            os.fsync(self._descriptor)
            self.dropped_bytes = size - start
        else:
            raise ValueError(f"{self.path} does not end in a JSON record: not a log; name another")

    def _last_line(self, size: int) -> int:
        """Offset just behind the last newline."""
        with open(self.path, "rb") as file:
            end = size
            while end > 0:
                start = max(0, end - _SKIP_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
        return 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Iterate over the records in the file, first to last, one in memory at a time.

        Raises:
            ValueError: A line is not a JSON object; the message names it.
        """
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                record = _object(line)
                if not isinstance(record, dict):
                    raise ValueError(
                        f"{self.path}, line {number} is not a JSON object; the file was changed "
                        "by something else: mend or delete that line, or name another file"
                    )
                yield record

    def ids(self, key: str = "id") -> set[str]:
        """The values of `key` over the records that have it."""
        return {record[key] for record in self.records() if key in record}

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; when this returns, it is on disk.

        Args:
            record: What `dumps` takes.

        Raises:
            ValueError: The record has no JSON form, or the log is closed. Nothing is written.
            OSError: The disk is full or failed. The file is cut back to the records before.
        """
        if self._descriptor < 0:
            raise ValueError(f"{self.path} is closed; open the log again to append")
        self._write(dumps(record))

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except BaseException as error:
            # If even this fails, the next opening cuts the torn line off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            if not isinstance(error, OSError):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}: the record was not written, all before it are whole; "
                "free space and run the same command again to continue",
                str(self.path),
            ) from error

    def close(self) -> None:
        """Release the file and its lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _object(line: bytes) -> Any:
    """The JSON value of a line, or None if it has none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
