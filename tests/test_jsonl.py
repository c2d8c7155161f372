import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from race_jax import jsonl
from race_jax.jsonl import JsonError, JsonlLog, dumps, lines, loads, replacing


def test_lines_end_only_at_newline_bytes(tmp_path):
    path = tmp_path / "x"
    path.write_bytes("a\u2028b\r\n\n\ufeffc\x85d\re".encode())
    assert list(lines(path)) == [
        (1, "a\u2028b\r\n".encode()),
        (2, b"\n"),
        (3, "c\x85d\re".encode()),
    ]


@pytest.mark.parametrize("length", [9, 10, 11, 25])
def test_long_lines_are_passed_over(tmp_path, length):
    path = tmp_path / "x"
    path.write_bytes(b"ab\n" + b"x" * (length - 1) + b"\ncd")
    middle = b"x" * (length - 1) + b"\n" if length <= 10 else None
    assert list(lines(path, max_bytes=10)) == [(1, b"ab\n"), (2, middle), (3, b"cd")]


def test_long_line_without_newline_at_the_end(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"ab\n" + b"x" * 50)
    assert list(lines(path, max_bytes=10)) == [(1, b"ab\n"), (2, None)]


@pytest.mark.parametrize(
    ("text", "rule", "says"),
    [
        (b'{"a": "\xff"}', "utf8", "byte 8 of the line (0xff)"),
        (b'{"a": "\xc3', "utf8", "byte 8"),
        (b'{"a": 1', "json", "column 8"),
        (b"", "json", "column 1"),
        (b'{"a": 1} {"b": 2}', "json", "Extra data"),
        (b"[" * 200_000, "json", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "json", "not usable JSON"),
        (rb'{"a": "\ud800"}', "utf8", "surrogate"),
        (rb'{"\uDC00": 1}', "utf8", "surrogate"),
    ],
)
def test_loads_refuses(text, rule, says):
    with pytest.raises(JsonError) as caught:
        loads(text)
    assert caught.value.rule == rule
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loads_notes_what_python_hides():
    assert loads(b'{"a": 1, "b": {"c": 1, "c": 2}}') == ({"a": 1, "b": {"c": 2}}, "c", 0)
    assert loads(b'{"a": [1e999, -Infinity, 1.5]}').nonfinite == 2
    assert loads('{"a": "NaN"}') == ({"a": "NaN"}, None, 0)
    # A pair of halves is one character; an escaped backslash is no escape.
    assert loads(rb'"\ud83d\ude00 \\ud800"').value == "\U0001f600 \\ud800"


def test_dumps_is_one_line_of_plain_utf8():
    record = {"a": "é\u2028\n", "b": np.float32(0.5), "c": np.arange(3), "d": np.bool_(True)}
    line = dumps(record)
    assert line.count(b"\n") == 1
    assert "é".encode() in line
    assert json.loads(line) == {"a": "é\u2028\n", "b": 0.5, "c": [0, 1, 2], "d": True}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), "\ud800", {1, 2}])
def test_dumps_names_the_record(value):
    with pytest.raises(ValueError, match="record 'r7' cannot be written as JSON"):
        dumps({"id": "r7", "x": value})


def test_replacing_leaves_the_old_file_until_done(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_text() == "old"
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["x"]


def test_replacing_follows_links_and_refuses_devices(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    link.symlink_to(path)
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink() and path.read_text() == "new"
    with pytest.raises(ValueError, match="not a regular file"), replacing("/dev/null"):
        pass
    with pytest.raises(ValueError, match="not a regular file"), replacing(tmp_path):
        pass


def test_replacing_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "no" / "x"
    with pytest.raises(FileNotFoundError) as caught, replacing(path):
        pass
    assert caught.value.filename == str(path)


def test_log_appends_and_lists(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        assert list(log.records()) == []
        log.append({"id": "a", "x": 1})
        # On disk at once, for any reader.
        assert path.read_text() == '{"id": "a", "x": 1}\n'
        log.append({"id": "b", "x": "\u2028"})
        log.append({"x": 3})
        assert [record["x"] for record in log.records()] == [1, "\u2028", 3]
    with JsonlLog(path) as log:
        assert log.dropped_bytes == 0
        assert log.ids() == {"a", "b"}
        log.append({"id": "c"})
    assert len(path.read_bytes().splitlines()) == 4
    with pytest.raises(ValueError, match="closed"):
        log.append({"id": "d"})


def test_log_survives_a_cut_at_every_byte(tmp_path):
    records = [{"id": "a", "t": "x\ny"}, {"id": "é", "n": {"k": [1, 2.5]}}, {"id": "c"}]
    whole = b"".join(map(dumps, records))
    ends = np.cumsum([len(dumps(record)) for record in records])
    path = tmp_path / "log.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with JsonlLog(path) as log:
            # A record that lacks only its newline is whole.
            kept = sum(bool(cut >= end - 1) for end in ends)
            assert list(log.records()) == records[:kept]
            start = ends[kept - 1] if kept else 0
            assert log.dropped_bytes == max(0, cut - start)
            log.append({"id": "new"})
            assert list(log.records()) == [*records[:kept], {"id": "new"}]


def test_log_cuts_off_zeros_that_never_reached_the_disk(tmp_path):
    path = tmp_path / "log.jsonl"
    for tail in (b"\0" * 7, b'{"id": "b\0\0\0'):
        path.write_bytes(b'{"id": "a"}\n' + tail)
        with JsonlLog(path) as log:
            assert log.dropped_bytes == len(tail)
            assert log.ids() == {"a"}


def test_log_finds_the_last_line_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "_SKIP_BYTES", 4)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "torn and long"')
    with JsonlLog(path) as log:
        assert log.ids() == {"a"}


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 binary",
        b"# A text\n\nof mine",
        b"# A text\n",
        b'[{"id": 1}]',
        b'{\n  "pretty": 1\n}',
        b'{"id": "a"}\nnotes of mine',
    ],
)
def test_log_leaves_a_file_of_another_kind_alone(tmp_path, content):
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a log"):
        JsonlLog(path)
    assert path.read_bytes() == content


def test_log_refuses_a_device_and_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        JsonlLog("/dev/null")
    with pytest.raises(FileNotFoundError):
        JsonlLog(tmp_path / "no" / "log")


def test_log_names_a_bad_line_in_the_middle(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": \n{"id": "c"}\n')
    with JsonlLog(path) as log, pytest.raises(ValueError, match="line 2 is not a JSON object"):
        list(log.records())


def test_a_bad_record_writes_nothing(tmp_path):
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.append({"id": "a"})
        with pytest.raises(ValueError, match="record 'b'"):
            log.append({"id": "b", "x": float("nan")})
        log.append({"id": "c"})
        assert log.ids() == {"a", "c"}


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    write, calls = os.write, []

    def full(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return write(descriptor, bytes(data)[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with JsonlLog(path) as log:
        log.append({"id": "a"})
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left.*all before it are whole") as caught:
            log.append({"id": "b"})
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(path)
        assert path.read_bytes() == b'{"id": "a"}\n'
        monkeypatch.setattr(os, "write", write)
        log.append({"id": "b"})
        assert log.ids() == {"a", "b"}


def run_python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_real_size_limit_loses_nothing(tmp_path):
    path = tmp_path / "log.jsonl"
    code = """
        import errno, resource, sys
        from race_jax.jsonl import JsonlLog
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with JsonlLog(sys.argv[1]) as log:
            for n in range(100):
                try:
                    log.append({"id": str(n), "text": "x" * 150})
                except OSError as error:
                    assert error.errno == errno.EFBIG
                    print(n)
                    break
    """
    process = run_python(code, path)
    out, _ = process.communicate(timeout=60)
    # A record is 168 bytes, so five fit into 1,000 and the sixth is torn and cut off.
    assert (process.returncode, out) == (0, "5\n")
    with JsonlLog(path) as log:
        assert log.dropped_bytes == 0
        assert log.ids() == {"0", "1", "2", "3", "4"}


def test_one_writer_at_a_time_and_no_stale_lock(tmp_path):
    path = tmp_path / "log.jsonl"
    code = """
        import sys
        from race_jax.jsonl import JsonlLog
        log = JsonlLog(sys.argv[1])
        n = 0
        while True:
            log.append({"id": n, "text": "x" * 5000})
            if n == 3:
                print("ready", flush=True)
            n += 1
    """
    process = run_python(code, path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match="written by another process"):
            JsonlLog(path)
        time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    with JsonlLog(path) as log:
        ids = [record["id"] for record in log.records()]
        assert len(ids) >= 4
        assert ids == list(range(len(ids)))
        with pytest.raises(ValueError, match="written by another process"):
            JsonlLog(path)
    JsonlLog(path).close()


def test_a_file_system_without_locks_only_warns(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(jsonl.fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked"), JsonlLog(tmp_path / "x") as log:
        log.append({"id": "a"})
        assert log.ids() == {"a"}
