"""Write the tool schemas and task ids of an AppWorld install to a file for `AppWorld`.

This file is run by the Python of AppWorld's own environment and needs nothing but AppWorld:

    APPWORLD_PYTHON race_jax/envs/appworld_export.py OUT.json [ROOT]
"""

import json
import sys
from pathlib import Path

DATASETS = ("train", "dev", "test_normal", "test_challenge")


def tools():
    """All functions as schemas.

    AppWorld's own schemas say neither which parameters are required nor which may be left out: many
    that may have no default there. Its other form of the documentation does.
    """
    from appworld.api_docs import prepare_api_docs  # pyright: ignore[reportMissingImports]
    from appworld.apps import get_all_apps  # pyright: ignore[reportMissingImports]

    found = []
    for app in get_all_apps(skip_admin=True):
        apis = prepare_api_docs(app, format="standard")
        required = {
            f"{app}__{api['api_name']}": [p["name"] for p in api["parameters"] if p["required"]]
            for api in apis
        }
        for tool in prepare_api_docs(app, format="function_calling"):
            function = tool["function"]
            function["parameters"]["required"] = required[function["name"]]
            found.append(tool)
    return found


def tasks():
    """Task ids by data set; empty without AppWorld's data."""
    from appworld.task import load_task_ids  # pyright: ignore[reportMissingImports]

    found = {}
    for name in DATASETS:
        try:
            found[name] = load_task_ids(name)
        except Exception as error:
            print(f"no task ids of {name}: {error}", file=sys.stderr)
    return found


def main(out, root=None):
    """Write the file.

    Args:
        out: The file.
        root: AppWorld's root, the folder that holds `data`; None for its own choice.
    """
    # Python looks beside the script first, and there is an appworld.py there.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    from appworld import __version__, update_root  # pyright: ignore

    if root is not None:
        update_root(root)
    record = {"version": __version__, "tools": tools(), "tasks": tasks()}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(record, file, default=dict)
    print(
        f"{out}: {len(record['tools'])} functions, {sum(map(len, record['tasks'].values()))} tasks"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
