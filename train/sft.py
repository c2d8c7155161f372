"""Supervised fine-tuning: RACE's first stage, and plain training on full reasoning.

Loss: negative log-likelihood of the policy's tokens, RACE eq. 12. The loop is all here; what it is
made of stands in `sft_setup`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console

from race_jax.checkpoint import Checkpoints
from race_jax.metrics import MetricWriter
from race_jax.sharding import use_mesh
from race_jax.train.distributed import largest_of_all, start
from race_jax.train.evaluate import close_table, evaluate, shown
from race_jax.train.interrupt import stop_requests
from race_jax.train.progress import Meter
from race_jax.train.runtime import peak_memory
from race_jax.train.sft_setup import Run, SftConfig, prepare
from race_jax.train.state import TrainState
from race_jax.train.step import places_in


def sft(config: SftConfig, *, console: Console | None = None, until: int | None = None) -> int:
    """Train as `config` says; a run that was cut short goes on from its last checkpoint.

    Args:
        config: The run.
        console: Where to show progress.
        until: Stop after this step as if the process had been asked to.

    Returns:
        Exit code 0, also when a signal ended the run early with a checkpoint.

    Raises:
        ValueError: A setting is at fault, the data is, or the checkpoint is of other settings.
        FloatingPointError: Several steps in a row had no finite loss or gradient.
        OSError: A checkpoint could not be written.
    """
    start(config.distributed)
    console = console or Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    run = prepare(config, console)
    with (
        use_mesh(run.mesh, run.rules),
        Checkpoints(run.folder / "checkpoints", keep=config.keep) as checkpoints,
        stop_requests() as stop,
    ):
        state = run.start(checkpoints)
        first = int(state.step)
        with MetricWriter(
            run.folder,
            step=first or None,
            trackers=config.track,
            settings=run.settings,
            active=jax.process_index() == 0,
        ) as writer:
            loop = Loop(run, checkpoints, writer, console, config.steps - first)
            rounds = loop.earlier_rounds() if first else {"step 0": loop.evaluate(0, state)}
            # The first step compiles: it tells nothing about the time that the others take.
            with Meter(console, "training", config.steps - first - 1) as loop.meter:
                for step in range(first + 1, config.steps + 1):
                    state, numbers = loop.advance(state)
                    loop.report(step, numbers)
                    if step % config.eval_every == 0 or step == config.steps:
                        rounds[f"step {step}"] = loop.evaluate(step, state)
                    stopped = bool(largest_of_all(stop.is_set())) or step == until
                    if stopped or step % config.save_every == 0 or step == config.steps:
                        loop.save(step, state)
                    if stopped:
                        break
            checkpoints.wait()
    if any(rounds.values()):
        ends = dict.fromkeys((next(iter(rounds)), next(reversed(rounds))))
        console.print(close_table({title: rounds[title] for title in ends}))
    console.print(f"{run.folder}: {int(state.step)} of {config.steps} steps done")
    return 0


@dataclasses.dataclass
class Loop:
    """What the loop does around its steps."""

    run: Run
    checkpoints: Checkpoints
    writer: MetricWriter
    console: Console
    total: int
    meter: Meter | None = None
    tokens: int = 0
    since: float = 0.0
    done: int = 0
    held_out: tuple[int, float] | None = None

    def advance(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step over the next batch."""
        batch = next(self.run.data)
        self.tokens += int(np.sum(batch["segment_ids"] > 0))
        places = int(largest_of_all(places_in(batch["loss_mask"], batch["tokens"].shape[1])))
        return self.run.step(state, self.run.frozen, self.run.place(batch), places)

    def report(self, step: int, numbers: Mapping[str, jax.Array]) -> None:
        """Write and show a step's numbers; stop the run if too many steps were lost.

        Raises:
            FloatingPointError: So many steps in a row were skipped.
        """
        config = self.run.config
        self.done += 1
        first = self.done == 1
        if not first and step % config.log_every and step != config.steps:
            return
        loss = float(numbers["loss"])  # waits for the step, so time is taken after it
        now = time.monotonic()
        rate = None if first else self.tokens / (now - self.since)
        self.tokens, self.since = 0, now
        assert self.meter is not None
        if first:
            self.meter.begun = now
        left = self.meter.spent * (self.total - self.done) / max(self.done - 1, 1)
        skipped, row = int(numbers["skipped"]), int(numbers["skipped_in_a_row"])
        rate_now = float(self.run.schedule(step - 1 - skipped))
        values = {
            "train/loss": loss,
            "train/tokens": float(numbers["weight"]),
            "train/learning_rate": rate_now,
            "train/grad_norm": float(numbers["grad_norm"]),
            "train/skipped": skipped,
            "train/epoch": self.run.data.epoch,
            "memory/peak_bytes": peak_memory(),
        }
        if rate is not None:
            values |= {"speed/tokens_per_second": rate, "speed/seconds_left": left}
        self.writer.write(step, values)
        speed = f"{rate:,.0f} tokens/s" if rate is not None else "compiling"
        self.meter.update(
            self.done - 1,
            f"step {step}/{config.steps}, loss {loss:.4f}, {speed}, "
            f"{values['memory/peak_bytes'] / 2**30:.1f} GiB",
        )
        if row >= config.optimizer.patience:
            raise FloatingPointError(
                f"{row} steps in a row, the last of them step {step}, had a loss or gradient that "
                "is not finite, and were skipped; the parameters are those of step "
                f"{step - row}. Lower optimizer.lr, or look at the data of these steps."
            )

    def earlier_rounds(self) -> dict[str, Mapping[str, float]]:
        """The evaluations that an earlier part of the run has written, by a title for each."""
        records = [r for r in self.writer.earlier if "eval/loss" in r]
        return {f"step {record['step']}": record for record in records}

    def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Held-out numbers, written and shown; empty without held-out data."""
        run = self.run
        if run.data.held_out is None:
            return {}
        batches = itertools.islice(run.data.held_out, run.config.eval_batches)
        found = evaluate(run.evaluation, state.trained, run.frozen, batches, run.place)
        self.writer.write(step, found)
        self.held_out = (step, found["eval/loss"]) if "eval/loss" in found else None
        self.console.print(f"held out after step {step}: {shown(found)}")
        self.tokens, self.since = 0, time.monotonic()  # the time taken here is no training time
        return found

    def save(self, step: int, state: TrainState) -> None:
        """Begin to save the state with all that a later run needs to go on from it."""
        notes: dict[str, Any] = {
            "settings": self.run.settings,
            "data": self.run.data.get_state(),
        }
        # A loss that was measured some steps ago says nothing about these parameters.
        fresh = self.held_out is not None and self.held_out[0] == step
        loss = self.held_out[1] if self.held_out is not None and fresh else None
        self.checkpoints.save(step, state, notes, loss=loss)
