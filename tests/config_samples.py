"""The files of settings in the repository, read as their commands read them."""

from pathlib import Path

from race_jax.train.cli import main

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def files_of(command):
    return sorted(CONFIGS.glob(f"{command}_*.yaml"))


def parsed(command, name, monkeypatch, *flags):
    """The settings that `race-jax COMMAND --config FILE` would run with."""
    seen = []
    place = f"race_jax.train.{command}.{command}"
    monkeypatch.setattr(place, lambda config: seen.append(config) or 0)
    assert main([command, "--config", str(CONFIGS / name), *flags]) == 0
    return seen[0]


def check_whole(command, path, monkeypatch):
    """A file names its own run, and says how it is called."""
    config = parsed(command, path.name, monkeypatch)
    assert config.out == f"runs/{path.stem}"
    assert f"configs/{path.name}" in path.read_text()
