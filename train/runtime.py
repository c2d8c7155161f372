"""What every command sets up: the compilation cache and a checkpoint's fingerprint."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from pathlib import Path

import jax

EDGE = 1 << 16
"""Bytes read at each end of a weight file for the fingerprint."""


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, so that a second run starts at once.

    They go to `JAX_COMPILATION_CACHE_DIR`, or to `race-jax/xla` in the user's cache folder.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "race-jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def check_folder(path: Path) -> None:
    """Raise ValueError if a file stands where a run's folder should."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"out {path} is a file; name a folder, new or of an earlier run")


def make_folder(path: Path) -> None:
    """Make the folder of a run, if there is none; raises as `check_folder` and `make_parents`."""
    check_folder(path)
    make_parents(path, str(path))


def make_parents(folder: Path, out: str) -> None:
    """Make `folder` for the output `out`; raise ValueError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out is {out!r}, and its folder cannot be made ({error.filename}: {error.strerror}); "
            "name one elsewhere"
        ) from None


def model_fingerprint(path: str) -> str:
    """A short name for a checkpoint's content: config, tokenizer, and the weight files' edges.

    Whole weight files are not read: tens of gigabytes would take minutes. Sizes, headers and both
    ends of every file tell real checkpoints apart.

    Args:
        path: Hugging Face directory.

    Returns:
        12 hexadecimal digits.
    """
    digest = hashlib.sha256()
    folder = Path(path)
    for name in ("config.json", "tokenizer.json"):
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else b"-")
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(EDGE))
            stream.seek(max(size - EDGE, 0))
            digest.update(stream.read(EDGE))
    return digest.hexdigest()[:12]


def peak_memory() -> int:
    """Most bytes held so far: of the first device where it tells, else of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
