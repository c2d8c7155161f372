"""Fill the table of docs/plan.md: each row is what `race-jax plan --row` prints.

    pip install 'jax[tpu]'
    python bench/plan_table.py

A row whose command is in the table already is kept; delete it there to have it made anew. Compiling
takes minutes a row and needs no TPU.
"""

import subprocess
import sys
from pathlib import Path

from race_jax.train.plan_cli import COLUMNS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
START, END = "<!-- plan_table.py: start -->", "<!-- plan_table.py: end -->"
RUNS = {
    # The smallest slice that fits, after the next smaller one where that had to be compiled.
    "qwen3_5_9b_scoring": ("v5e:2x2", "v6e:2x2", "v5p:2x2x1"),
    "qwen3_5_9b_sft": ("v5e:4x4", "v5e:4x8", "v6e:2x4", "v6e:4x4", "v5p:2x2x1"),
    "qwen3_5_9b_rl": ("v5e:4x8", "v6e:4x4", "v5p:2x2x1"),
    "qwen3_30b_a3b_scoring": ("v5e:4x4", "v6e:2x4", "v5p:2x2x1"),
    "qwen3_30b_a3b_sft": ("v5e:8x8", "v6e:4x8", "v5p:2x2x2"),
    "qwen3_30b_a3b_rl": ("v5e:8x8", "v6e:4x8", "v5p:2x2x2"),
}


def rows_of(text):
    """The rows of the table, by command."""
    table = text.partition(START)[2].partition(END)[0]
    found = {}
    for line in table.strip().splitlines()[2:]:
        found.setdefault(line.rsplit("`", 2)[1], []).append(line)
    return found


def write(rows):
    """Put the table back, in the order of `RUNS`."""
    text = DOCS.read_text(encoding="utf-8")
    head = "| " + " | ".join(COLUMNS) + " |"
    lines = [head, "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    lines += [line for command in commands() for line in rows.get(command, [])]
    before, after = text.partition(START)[0], text.partition(END)[2]
    DOCS.write_text("\n".join([before + START, *lines, END]) + after, encoding="utf-8")


def commands():
    """All commands, in order."""
    for name, topologies in RUNS.items():
        for topology in topologies:
            yield f"race-jax plan --config configs/plan_{name}.yaml --topology {topology}"


def main():
    """Make the rows that are missing."""
    for command in commands():
        if command in rows_of(DOCS.read_text(encoding="utf-8")):
            continue
        print(command, flush=True)
        words = [sys.executable, "-m", "race_jax.train.cli", *command.split()[1:], "--row"]
        out = subprocess.run(words, capture_output=True, text=True, cwd=DOCS.parents[1])
        if out.returncode not in (0, 1):
            print(out.stderr[-500:], file=sys.stderr)
            continue
        found = rows_of(DOCS.read_text(encoding="utf-8"))
        write({**found, command: out.stdout.strip().splitlines()})


if __name__ == "__main__":
    main()
