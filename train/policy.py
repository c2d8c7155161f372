"""What every training on a policy's own episodes shares: the loop, LoGiC, the update, the numbers.

A step samples episodes with the current policy, judges them, and updates the policy. How episodes
are sampled and judged is the method's own: `rl` compares trajectories of a task, `carl` branches of
its tree. The loop is all here; what it is made of stands in `rl_setup`.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from race_jax.checkpoint import Checkpoints
from race_jax.envs.base import EnvironmentFault
from race_jax.logic.cover import most_scored
from race_jax.logic.engine import Failure
from race_jax.losses import truncated_importance
from race_jax.metrics import MetricWriter
from race_jax.rl_data import RowStats, task_order
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import request_seed
from race_jax.rollout.loop import RunFailed, Runner
from race_jax.rollout.measures import Measures, measure, stops_line
from race_jax.rollout.results import Group, Rollout, gather, read_rollouts
from race_jax.rollout.workers import make_host
from race_jax.sharding import use_mesh
from race_jax.train.interrupt import stop_requests
from race_jax.train.rl_config import PolicyRunConfig
from race_jax.train.rl_setup import Run, fingerprint, open_rollouts, prepare, settings_of_step
from race_jax.train.rl_watch import Guard, barren_notice, check_start, count_barren
from race_jax.train.runtime import peak_memory
from race_jax.train.state import TrainState
from race_jax.train.step import places_in

Numbers = dict[str, float]
Item = TypeVar("Item")


def train_policy(
    config: PolicyRunConfig,
    make_loop: Callable[[Run, MetricWriter, Console, threading.Event], PolicyLoop[Any]],
    *,
    console: Console | None = None,
    until: int | None = None,
) -> int:
    """A run of any kind of policy training; arguments beside `make_loop` and results as of `rl`."""
    console = console or Console(highlight=False, soft_wrap=True, markup=False)
    try:
        run = prepare(config)
    except EnvironmentFault as fault:
        raise ValueError(f"environment {config.env.name!r}: {fault}") from None
    code = 0
    with (
        use_mesh(run.mesh, run.rules),
        Checkpoints(run.folder / "checkpoints", keep=config.keep) as checkpoints,
        stop_requests() as stop,
    ):
        state = run.start(checkpoints)
        first = int(state.step) // config.epochs
        with (
            MetricWriter(
                run.folder, step=first or None, trackers=config.track, settings=run.settings
            ) as writer,
            make_loop(run, writer, console, stop) as loop,
        ):
            done = first
            for step in range(first + 1, config.steps + 1):
                try:
                    advanced = loop.advance(step, state)
                except RunFailed as failure:
                    console.print(f"{failure}")
                    advanced, code = None, 1
                if advanced is None:
                    break
                state, done = advanced, step
                stopped = stop.is_set() or step == until
                if stopped or step % config.save_every == 0 or step == config.steps:
                    checkpoints.save(step, state, loop.notes)
                if stopped:
                    break
            if done:
                checkpoints.save(done, state, loop.notes)
            checkpoints.wait()
    console.print(f"{run.folder}: {done} of {config.steps} steps done")
    return code


@dataclasses.dataclass
class PolicyLoop(abc.ABC, Generic[Item]):
    """One step after the other; a context manager that closes environments and sampler.

    `Item` is what the method's update takes: a trajectory, or a tree.
    """

    keep_caches: ClassVar[bool] = False
    """Whether the sampler keeps the caches of finished episodes, so that others can fork there."""

    run: Run
    writer: MetricWriter
    console: Console
    stop: threading.Event

    @property
    @abc.abstractmethod
    def samples(self) -> int:
        """Episodes of each task in a step."""

    @property
    @abc.abstractmethod
    def method(self) -> dict[str, Any]:
        """The method's own settings that decide a step's episodes, ready for JSON."""

    @abc.abstractmethod
    def episodes(
        self, runner: Runner, tasks: Sequence[str], done: Mapping[str, Rollout]
    ) -> Iterator[Rollout]:
        """Run a step's episodes.

        Args:
            runner: What runs them.
            tasks: Names of the step's tasks.
            done: Those that an earlier part of the run has finished, by name.

        Yields:
            Each that was not done as it is finished.
        """

    @abc.abstractmethod
    def judge(self, groups: Sequence[Group], state: TrainState) -> tuple[Sequence[Item], Numbers]:
        """What the update needs to know of a step's episodes, and the method's numbers on them.

        Args:
            groups: By task; at least one has a usable episode.
            state: The policy that sampled them.

        Raises:
            RunFailed: There is nothing to train on.
        """

    @abc.abstractmethod
    def rows(self, items: Sequence[Item], closure: float) -> tuple[dict[str, np.ndarray], RowStats]:
        """The rows of an update.

        Args:
            items: What `judge` returned.
            closure: lambda of the closure loss.
        """

    def __enter__(self) -> Self:
        config = self.run.config
        self.in_flight = config.in_flight or config.sampler.slots
        self.host = make_host(config.env, config.rollout.step_timeout, self.in_flight)
        (self.run.folder / "rollouts").mkdir(exist_ok=True)
        closing = config.loss.closure > 0 and config.logic.enabled
        self.guard = Guard(config.guard, closing, self.run.notes)
        self.barren, self.step = count_barren(self.writer.earlier), 0
        return self

    def __exit__(self, *_: object) -> None:
        self.host.close()
        self.run.sampler.close()

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint of the last step holds beside its arrays."""
        return {"settings": self.run.settings, "guard": self.guard.state._asdict()}

    def advance(self, step: int, state: TrainState) -> TrainState | None:
        """Step `step`, from 1; None if a signal cut its rollouts short, which are kept.

        Raises:
            RunFailed: The environment spoils everything, no episode can be used, or the policy has
                collapsed into closing.
            ValueError: The start policy cannot be taught to close.
            FloatingPointError: Too many updates in a row were skipped.
        """
        began, self.step = time.monotonic(), step
        groups = self._play(step, state)
        if groups is None:
            return None
        played = time.monotonic()
        found = measure((r for group in groups for r in group.rollouts), "step")
        config = self.run.config
        if step == 1:
            self._say(check_start(found, config.loss, config.guard, covered=config.logic.enabled))
        if not any(group.usable for group in groups):
            raise RunFailed(f"no episode of the step can be trained on; {stops_line(found)}")
        items, judged = self.judge(groups, state)
        clock = time.monotonic()
        state, told = self._update(step, state, items)
        numbers = (
            measured(found, groups)
            | judged
            | told
            | {
                "time/rollout": played - began,
                "time/logic": clock - played,
                "time/update": time.monotonic() - clock,
                "memory/peak_bytes": peak_memory(),
            }
        )
        self.writer.write(step, numbers)
        self._show(step, numbers)
        self._say(self.guard.note(step, numbers))
        self.barren = 0 if found.successes else self.barren + 1
        self._say(barren_notice(self.barren, found))
        row = int(state.skipped_in_a_row)
        if row >= config.optimizer.patience:
            raise FloatingPointError(
                f"{row} updates in a row, the last of them in step "
                f"{step}, had a loss or gradient that is not finite, and were skipped. Lower "
                "optimizer.lr, or look at the rollouts of these steps."
            )
        return state

    def _play(self, step: int, state: TrainState) -> list[Group] | None:
        """The step's episodes by the current policy, in groups in the order of the tasks."""
        run, config = self.run, self.run.config
        run.sampler.update(run.policy(state, config.sampler.dtype))
        chosen = task_order(len(run.tasks), config.seed, step - 1, config.prompts)
        names = [run.tasks[n] for n in chosen]
        seed = request_seed(config.seed, "step", step, config.rollout.seed)
        runner = Runner(
            run.sampler,
            run.renderer,
            self.host,
            dataclasses.replace(config.rollout, seed=seed),
            in_flight=self.in_flight,
            keep=self.keep_caches,
        )
        path = run.folder / "rollouts" / f"step_{step:06}.jsonl"
        settings = settings_of_step(run, step, fingerprint(state)) | self.method
        with open_rollouts(path, settings) as file:
            earlier = {r.id: r for r in read_rollouts(path) if r.id in file.done}
            for rollout in self.episodes(runner, names, earlier):
                file.append(rollout)
        # Read back in any case: a step that was cut short and one that was not see the same.
        rollouts = {rollout.id: rollout for rollout in read_rollouts(path)}
        if self.stop.is_set() and len(rollouts) < len(names) * self.samples:
            return None
        jobs = [Job(run.env_name, name, n) for name in names for n in range(self.samples)]
        return list(gather((rollouts[job.id] for job in jobs if job.id in rollouts), self.samples))

    def covers(
        self, rollouts: Sequence[Rollout], state: TrainState
    ) -> tuple[dict[str, tuple[int, ...]], Numbers]:
        """S_i of the successful trajectories by name, and numbers on them."""
        run, logic = self.run, self.run.config.logic
        if not logic.enabled:
            return {}, {"rl/cover_skips": 0.0, "rl/unscored": 0}
        run.engine.update(run.policy(state, logic.dtype))
        successes = [r.tokens for r in rollouts if r.success and r.tokens is not None]
        covers, distances, failed = {}, [], 0
        for found in run.engine.run(successes, [logic.epsilon]):
            if isinstance(found, Failure):
                self._say(f"{found.id} was not scored: {found.reason}")
                failed += 1
            else:
                covers[found[0].id] = found[0].removed
                distances += [abs(r.max_decrease - logic.epsilon) for r in found[0].removals]
        turns = sum(len(r.notes) for r in rollouts if r.success)
        skips = sum(map(len, covers.values())) / max(turns, 1)
        numbers = {"rl/cover_skips": skips, "rl/unscored": failed}
        scored = [tokens for tokens in successes if tokens.id in covers]
        if scored:
            floor = run.noise_floor(state, min(scored, key=most_scored))
            near = sum(distance < floor for distance in distances)
            numbers |= {"rl/noise_floor": floor, "rl/uncertain": near / max(len(distances), 1)}
        return covers, numbers

    def _update(
        self, step: int, state: TrainState, items: Sequence[Item]
    ) -> tuple[TrainState, Numbers]:
        """All updates on one batch, with the old log-probabilities fixed."""
        run, config = self.run, self.run.config
        closure = run.closure_at(step - 1) * self.guard.scale
        batch, stats = self.rows(items, closure)
        parts = len(batch["tokens"]) // config.rows
        places = places_in(batch["loss_mask"], config.row_length, 4)
        arrays = dict(run.place(batch))
        mismatch: Any = None
        if config.loss.old_logprobs == "recomputed":
            sampler = arrays["old_logprobs"]
            old = run.scorer_of(parts)(state.trained, run.frozen, arrays, places)
            arrays["old_logprobs"] = jnp.where(arrays["completion"], old, 0)
            gap = jnp.abs(arrays["old_logprobs"] - sampler)
            mismatch = jnp.sum(jnp.where(arrays["completion"], gap, 0)) / stats.policy
            if config.loss.importance_limit is not None:
                arrays["importance"] = truncated_importance(
                    arrays["old_logprobs"], sampler, limit=config.loss.importance_limit
                )
        told: Mapping[str, jax.Array] = {}
        rate = 0.0
        for _ in range(config.epochs):
            rate = float(run.schedule(int(state.step) - int(state.skipped)))
            state, told = run.step_of(parts)(state, run.frozen, arrays, places)
            mismatch = told["gap"] / told["policy"] if mismatch is None else mismatch
        numbers = update_numbers({k: float(v) for k, v in told.items()}, stats)
        return state, numbers | {
            "rl/mismatch": float(mismatch),
            "rl/closure": closure,
            "train/learning_rate": rate,
        }

    def _say(self, text: str) -> None:
        if text:
            self.console.print(text)

    def summary(self, n: Mapping[str, float]) -> str:
        """What the console says of a step, before its loss."""
        text = (
            f"success {n['rl/success']:.2f}, reasoning {n['rl/reasoning_tokens']:.0f}, "
            f"skips {n['rl/skip_ratio']:.2f}"
        )
        if self.run.config.logic.enabled:
            text += (
                f", LoGiC removes {n['rl/cover_skips']:.2f}, "
                f"closes where it keeps {n.get('rl/close_at_kept', 0):.2f}"
            )
        return text

    def _show(self, step: int, n: Mapping[str, float]) -> None:
        times = [n[f"time/{name}"] for name in ("rollout", "logic", "update")]
        shares = ", ".join(
            f"{name} {100 * t / sum(times):.0f} %"
            for name, t in zip(("rollout", "LoGiC", "update"), times, strict=True)
        )
        self.console.print(
            f"step {step}/{self.run.config.steps}: {self.summary(n)}, loss "
            f"{n['train/loss']:.4f}; {sum(times):.1f} s: {shares}"
        )


def measured(found: Measures, groups: Sequence[Group]) -> Numbers:
    """The metrics of a step's episodes, spoilt ones too."""
    return {
        "rl/reward": found.reward,
        "rl/success": found.success,
        "rl/reasoning_tokens": found.reasoning_tokens,
        "rl/skip_ratio": found.skip_ratio,
        "rl/thinking_tokens": found.thinking_tokens,
        "rl/turns": found.turns,
        "rl/truncated": found.truncated,
        "rl/unusable": found.episodes - sum(len(group.usable) for group in groups),
    }


def update_numbers(told: Mapping[str, float], stats: RowStats) -> Numbers:
    """The metrics of an update, from what the step told and what its rows held."""
    policy, kept = max(told["policy"], 1), max(told["kept"], 1)
    numbers = {
        "train/loss": told["loss"],
        "train/tokens": told["policy"],
        "train/grad_norm": told["grad_norm"],
        "train/skipped": told["skipped"],
        "rl/ratio": told["ratio"] / kept,
        "rl/clipped": told["clipped"] / kept,
        "rl/entropy": told["surprisal"] / policy,
        "rl/masked": stats.masked / max(stats.policy, 1),
        "rl/closings_per_turn": stats.closings / stats.turns,
        "rl/extra_tokens": stats.extra / stats.sampled,
        "rl/filled": 1 - stats.padding / (stats.padding + stats.sampled + stats.extra),
    }
    if "bounded_norm" in told:
        numbers["rl/closure_grad_norm"] = told["bounded_norm"]
    if "asked" in told:
        numbers["rl/kept_turns"] = told["asked"]
        if told["asked"]:
            numbers["rl/close_at_kept"] = told["closing"] / told["asked"]
    if told["closings"]:
        numbers["rl/close_nats"] = told["close_nats"] / told["closings"]
    return numbers
