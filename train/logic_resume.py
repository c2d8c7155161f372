"""What a LoGiC output file holds already, and whether a run may go on in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from race_jax.jsonl import JsonlLog, same_file
from race_jax.report import find_fault


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a usable trajectory stands in the input, and what scoring it takes."""

    line: int
    id: str
    digest: str
    tokens: int
    turns: int


def check_files(trajectories: str, out: str) -> None:
    """Refuse, before anything is opened, files that a run cannot use or would harm.

    Raises:
        ValueError: The input is no regular file, or the output is the input, a directory, or in a
            directory that is not there.
    """
    if not Path(trajectories).exists():
        raise ValueError(f"--trajectories {trajectories}: there is no such file")
    if not Path(trajectories).is_file():
        raise ValueError(
            f"--trajectories {trajectories}: it must be a regular file, since it is read twice; "
            "save its text to one"
        )
    if same_file(trajectories, out):
        raise ValueError(f"--out {out} is the input itself; name another file")
    if not out or Path(out).is_dir():
        raise ValueError(f"--out {out!r} is a directory; name a file in it")
    if not Path(out).resolve().parent.is_dir():
        raise ValueError(
            f"--out {out}: the directory {Path(out).parent} is not there; make it first"
        )


def already_done(
    log: JsonlLog, settings: dict[str, Any], epsilons: tuple[float, ...], save_tokens: bool
) -> dict[tuple[str, float], str]:
    """The results that the output holds already: (id, epsilon) -> digest of what was scored.

    Raises:
        ValueError: The output was made with other settings, or is something else.
    """
    done: dict[tuple[str, float], str] = {}
    unnamed: set[float] = set()
    for number, record in enumerate(log.records(), 1):
        fault = find_fault(record)
        if fault:
            raise ValueError(
                f"{log.path} holds something else than LoGiC's output (record {number}: {fault}); "
                "name another --out, or delete that record"
            )
        made = {key: record.get(key) for key in settings} | {"save_tokens": "tokens" in record}
        mine = settings | {"save_tokens": save_tokens}
        # The fingerprint decides whether it is the same model, wherever it lies.
        differing = [key for key in mine if key != "model" and made[key] != mine[key]]
        epsilon = float(record["epsilon"])
        if epsilon not in epsilons:
            unnamed.add(epsilon)
        if differing:
            what = "; ".join(f"{key} was {made[key]}, now {mine[key]}" for key in differing)
            raise ValueError(
                f"{log.path} was made with other settings ({what}): name another --out, or repeat "
                "the settings it was made with"
            )
        done[record["id"], epsilon] = str(record.get("input_id"))
    if unnamed:
        all_of_them = ",".join(map(str, sorted({*unnamed, *epsilons})))
        raise ValueError(
            f"{log.path} holds results at epsilon {', '.join(map(str, sorted(unnamed)))} too: add "
            f"them (--epsilon {all_of_them}), or name another --out"
        )
    return done


def still_pending(
    sources: list[Source], done: dict[tuple[str, float], str], epsilons: tuple[float, ...], out: str
) -> list[Source]:
    """The trajectories that lack a result at any threshold.

    Raises:
        ValueError: The output holds a result of another trajectory under the same name.
    """
    for source in sources:
        for epsilon in epsilons:
            if done.get((source.id, epsilon), source.digest) != source.digest:
                raise ValueError(
                    f"{out} holds a result for trajectory {source.id} with other content: the "
                    "input file changed; name another --out"
                )
    return [s for s in sources if any((s.id, epsilon) not in done for epsilon in epsilons)]
