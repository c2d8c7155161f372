"""Host memory while a checkpoint of several GB is read and written.

    python bench/loading.py --gigabytes 3

writes random weights in a temporary directory, then reads them, and saves what it read, in a
process of its own that watches its memory. On a CPU the devices' arrays are host memory too. So the
table shows how far the peak lies above the start plus the arrays, whose size is known exactly:
that is what reading and writing needed beside them. Pages of mapped files are counted apart. The
system may drop those at any time; they show up in the resident size all the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from race_jax.models import ModelConfig, abstract_params, load_model, save_model
from race_jax.models.hf import _plan_files, _write_json
from race_jax.models.shards import write_safetensors
from race_jax.models.weights import checkpoint_slots

MB = 1e6


def shape_config(gigabytes: float, family: str) -> ModelConfig:
    """A wide and shallow model of about that size in bfloat16; half of it is blocks."""
    width = 4096 if gigabytes >= 1 else 512
    layers, vocab = 4, int(gigabytes * 1e9 / 4 / (2 * width)) // 128 * 128
    rest = gigabytes * 1e9 / 4 - 2 * layers * 4 * width * width / 2
    mlp = max(int(2 * rest / (2 * layers * 3 * width)) // 128 * 128, 256)
    sizes = (vocab, width, mlp, layers, width // 128)
    if family == "qwen3":
        return ModelConfig("qwen3", *sizes, num_key_value_heads=width // 256, head_dim=128)
    return ModelConfig(
        "qwen3_moe",
        *sizes,
        num_key_value_heads=width // 256,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=max(mlp // 16 // 8 * 8, 8),
    )


def write_checkpoint(config: ModelConfig, directory: Path, shard_bytes: float) -> int:
    """Random bfloat16 weights in shards; returns the size of the largest tensor in bytes."""
    slots = checkpoint_slots(config, abstract_params(config, "bfloat16"))
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(1 << 22, dtype=np.float32).astype(jnp.bfloat16)
    plan = _plan_files(slots, 2, shard_bytes)
    directory.mkdir()
    for file, members in plan.items():
        shapes = {name: slot.shape for name, slot in members.items()}
        tensors = (np.resize(pool, shape) for shape in shapes.values())
        write_safetensors(directory / file, shapes, jnp.bfloat16, tensors)
    where = {name: file for file, members in plan.items() for name in members}
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    _write_json(directory / "config.json", config.to_hf())
    return 2 * max(int(np.prod(slot.shape)) for slot in slots.values())


class Watch:
    """The highest anonymous and file-backed resident memory of this process, sampled."""

    def __init__(self):
        self.anonymous = self.mapped = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        """Sample until told to stop."""
        while not self.stop.is_set():
            anonymous, mapped = memory()
            self.anonymous, self.mapped = max(self.anonymous, anonymous), max(self.mapped, mapped)
            time.sleep(0.001)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def memory() -> tuple[int, int]:
    """Anonymous and file-backed resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return int(sizes["RssAnon"]) * 1024, int(sizes["RssFile"]) * 1024


def measure(directory: Path, out: Path, dtype: str, shard_bytes: float) -> dict[str, float]:
    """Read and write a checkpoint in this process; every size in bytes."""
    jnp.zeros(8).block_until_ready()
    start, pages = memory()
    with Watch() as reading:
        model = load_model(directory, dtype)
        jax.block_until_ready(model.params)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    after, _ = memory()
    with Watch() as writing:
        save_model(model, out, shard_bytes=shard_bytes)
    return {
        "arrays": arrays,
        "read": reading.anonymous - start - arrays,
        "read_mapped": reading.mapped - pages,
        "kept": after - start - arrays,
        "write": writing.anonymous - after,
    }


def show(config: ModelConfig, largest: int, found: dict[str, float]) -> None:
    """One table, with ratios to the largest tensor."""
    table = Table(title=f"{config.model_type}, {found['arrays'] / 1e9:.2f} GB of parameters")
    table.add_column("host memory")
    table.add_column("MB", justify="right")
    table.add_column("x largest tensor", justify="right")
    rows = {
        "largest tensor": largest,
        "peak while reading, beside the arrays": found["read"],
        "  file pages mapped meanwhile": found["read_mapped"],
        "kept after reading, beside the arrays": found["kept"],
        "peak while writing, beside the arrays": found["write"],
    }
    for name, size in rows.items():
        table.add_row(name, f"{size / MB:,.0f}", f"{size / largest:.2f}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--family", choices=("qwen3", "qwen3_moe"), default="qwen3")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shard-gigabytes", type=float, default=1.0, help="largest file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shard = args.shard_gigabytes * 1e9
    if args.measure:
        found = measure(args.measure / "model", args.measure / "saved", args.dtype, shard)
        print(json.dumps(found))
        return
    config = shape_config(args.gigabytes, args.family)
    with tempfile.TemporaryDirectory(prefix="race-jax-loading-") as scratch:
        free = shutil.disk_usage(scratch).free
        if free < 2.2e9 * args.gigabytes:
            sys.exit(f"{scratch} has {free / 1e9:.1f} GB free; choose a smaller --gigabytes.")
        largest = write_checkpoint(config, Path(scratch) / "model", shard)
        command = [sys.executable, *sys.argv, "--measure", scratch]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    show(config, largest, json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
