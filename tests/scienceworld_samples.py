"""Whether the simulator of ScienceWorld runs here, and calls to it."""

import importlib.metadata
import shutil

import pytest

from race_jax.envs.scienceworld import VERSION


def missing():
    """Why the simulator cannot run here; empty if it can."""
    try:
        installed = importlib.metadata.version("scienceworld")
    except importlib.metadata.PackageNotFoundError:
        return "the package scienceworld is not installed"
    if installed != VERSION:
        return f"the package scienceworld has version {installed}, not {VERSION}"
    return "" if shutil.which("java") else "there is no java on the PATH"


needs_simulator = pytest.mark.skipif(bool(missing()), reason=missing() or "it is here")


def call(name, **arguments):
    return {"name": name, "arguments": arguments}
