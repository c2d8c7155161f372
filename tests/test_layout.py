"""The tree keeps its shape: what is packaged, who may import whom, how long files grow."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {"race_jax": ROOT / "race_jax", "models": ROOT / "models", "train": ROOT / "train"}


def sources():
    for top, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            yield top, path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_packages_listed_are_the_folders():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in (ROOT / "race_jax").rglob("__init__.py")
    } | {"race_jax.models", "race_jax.train"}
    assert listed == found
    for flat in ("models", "train"):
        assert not [p for p in FOLDERS[flat].iterdir() if p.is_dir() and p.name != "__pycache__"]


def test_imports_go_one_way():
    forbidden = {
        "race_jax": ("race_jax.models", "race_jax.train"),
        "models": ("race_jax.train",),
        "train": (),
    }
    for top, path, tree in sources():
        for name in imported(tree):
            assert not name.startswith(forbidden[top]), f"{path} imports {name}"
            assert name.split(".")[0] not in ("models", "train"), f"{path} imports {name}"


def test_sizes_stay_within_the_house_limits():
    for top, path, tree in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= (600 if top == "models" else 400), f"{path} has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 80, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_configs_are_not_read_with_silent_defaults():
    for _, path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                name = getattr(node.args[0], "id", "")
                assert not (len(node.args) == 3 and re.match("cfg|config", name)), path


def test_one_module_alone_decides_where_arrays_go():
    for _, path, tree in sources():
        if path.name != "sharding.py":
            named = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
            named += [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
            assert not {"PartitionSpec", "P"} & {*named, *imported_names(tree)}, path


def imported_names(tree):
    return {name.rpartition(".")[2] for name in imported(tree)}
