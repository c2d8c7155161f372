"""`race-jax logic`: which turns of finished trajectories can go without their reasoning."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from race_jax.chat import Renderer, SkipForm, renderer_for
from race_jax.families import family_of
from race_jax.jsonl import JsonlLog
from race_jax.logic.cover import check_epsilons, most_scored
from race_jax.logic.engine import Engine, Failure, Stats
from race_jax.logic.lanes import Lanes, default_lanes
from race_jax.logic.noise import RESOLUTION, noise_floor
from race_jax.logic.records import cover_record, digest_of
from race_jax.logic.scoring import Scorer
from race_jax.logic.seats import fit_slots
from race_jax.models import Model, load_config, load_model
from race_jax.report import find_fault, summary_table
from race_jax.report_view import visible
from race_jax.tokenizer import load_tokenizer
from race_jax.train.logic_resume import (
    Source,
    already_done,
    check_files,
    still_pending,
)
from race_jax.train.progress import Meter
from race_jax.train.runtime import enable_compilation_cache, model_fingerprint
from race_jax.trajectories import Line, scan
from race_jax.types import TokenTrajectory, Trajectory

CHANGED = "changed while this run read it; run the same command again once nothing writes to it"
CALIBRATION = 2
"""Trajectories whose likelihoods are computed twice to measure the noise floor."""
MOST_NAMED = 50
"""Bad lines that are named one by one; all are counted."""
TOTALS = ("id", "epsilon", "turns", "tokens_forwarded", "tokens_minimum", "tokens_naive")
"""What the closing table needs of a record."""


def parse_epsilons(text: str) -> tuple[float, ...]:
    """Thresholds from `0.001` or `0.001,0.01`.

    Raises:
        ValueError: A part is not a finite number of at least 0.
    """
    values = []
    for part in str(text).split(","):
        try:
            values.append(float(part))
        except ValueError:
            raise ValueError(
                f"--epsilon {text}: {part!r} is not a number; write thresholds in nats per token, "
                "separated by commas, such as 0.001,0.01"
            ) from None
    return check_epsilons(values)


class Survey:
    """The input file, read once for lengths and faults, and again for the work.

    Only names and lengths are kept, so the file may be larger than memory.
    """

    def __init__(self, path: str, renderer: Renderer, context: int, vocab: int):
        """Prepare to read `path`; nothing is read yet."""
        self.path, self.renderer, self.context, self.vocab = path, renderer, context, vocab
        self.sources: list[Source] = []
        self.faults = 0

    def load(self, limit: int | None) -> Iterator[str]:
        """Note every usable trajectory's length; yields what is wrong with each bad one."""
        for line in scan(self.path):
            if limit is not None and len(self.sources) >= limit:
                return
            try:
                self.sources.append(self._source(line))
            except ValueError as error:
                self.faults += 1
                yield f"{self.path}:{line.number}: {error}"

    def _source(self, line: Line) -> Source:
        if line.trajectory is None:
            raise ValueError("; ".join(f"{f.rule}: {f.message}" for f in line.faults))
        item = line.trajectory
        tokens = self.renderer.encode(item)
        sequence = tokens.assemble()
        length = most_scored(tokens)
        if length > self.context:
            raise ValueError(
                f"trajectory {item.id}: {length} tokens to score, but the model's context is "
                f"{self.context}; shorten it, or use a checkpoint with a longer context"
            )
        if int(sequence.tokens.max()) >= self.vocab:
            raise ValueError(
                f"trajectory {item.id}: token id {int(sequence.tokens.max())} is outside the "
                f"model's vocabulary of {self.vocab}; tokenizer and model do not belong together"
            )
        return Source(line.number, item.id, digest_of(tokens), length, len(tokens.turns))

    def trajectories(self, wanted: set[int]) -> Iterator[tuple[Trajectory, TokenTrajectory]]:
        """The trajectories on these lines, read and rendered anew."""
        for line in scan(self.path):
            if line.number in wanted and line.trajectory is not None:
                yield line.trajectory, self.renderer.encode(line.trajectory)


@dataclasses.dataclass
class Run:
    """One run over the pending trajectories."""

    survey: Survey
    network: Model
    settings: dict[str, Any]
    epsilons: tuple[float, ...]
    console: Console
    slots: int
    rows: int
    row_tokens: int
    lanes: int
    floor: float = 0.0

    def write(
        self, log: JsonlLog, pending: list[Source], done: dict, *, save_tokens: bool, strict: bool
    ) -> int:
        """Append a record per trajectory and threshold; returns how many trajectories failed."""
        failures = 0
        digests = {source.id: source.digest for source in pending}
        groups = group_by_length(pending)
        lacking = [e for e in self.epsilons if any((s.id, e) not in done for s in pending)]
        engine = self._engine(groups[0])
        self.floor = self._measure(engine, groups[0])
        with Meter(self.console, "LoGiC", sum(s.tokens for s in pending)) as meter:
            before = Stats()
            for group in groups:
                engine = engine if group is groups[0] else self._engine(group)
                update = functools.partial(show, meter, before)
                originals: dict[str, tuple[Trajectory, TokenTrajectory]] = {}
                for result in engine.run(self._feed(group, originals), lacking, update):
                    if isinstance(result, Failure):
                        failures += 1
                        reason = f"bad trajectory: {result.id}: {result.reason}"
                        self.console.print(visible(reason))
                        if strict:
                            return failures
                        continue
                    trajectory, tokens = originals.pop(result[0].id)
                    records = [
                        self._record(cover, trajectory, tokens, digests, save_tokens)
                        for cover in result
                        if (cover.id, cover.epsilon) not in done
                    ]
                    for record in records:
                        log.append(record)
                before = before.plus(engine.stats)
        return failures

    def _engine(self, group: list[Source]) -> Lanes:
        length = max(source.tokens for source in group)
        slots = min(self.slots, len(group))
        slots = fit_slots(
            self.network,
            self.network.params,
            length + self.row_tokens,
            slots,
            len(self.epsilons),
            max(source.turns for source in group),
        )
        lanes = min(self.lanes, max(slots, 1))
        engine = Engine(
            self.network,
            self.network.params,
            length=length,
            slots=-(-slots // lanes),
            rows=self.rows,
            row_tokens=self.row_tokens,
        )
        return Lanes(engine, lanes)

    def _measure(self, engine: Lanes, group: list[Source]) -> float:
        """The run's noise floor, on the shortest trajectories of a group that can be scored."""
        shortest = sorted(group, key=lambda source: source.tokens)[: 4 * CALIBRATION]
        samples = [tokens for _, tokens in self.survey.trajectories({s.line for s in shortest})]
        # The peer of a bfloat16 trunk is the same weights in float32: two bfloat16 passes would
        # share most of their rounding, and agree with each other more than with the truth.
        exact = jax.tree.map(lambda x: x.astype(jnp.float32), self.network.params)
        scorer = Scorer(self.network, exact)
        floors: list[float] = []
        for sample in sorted(samples, key=most_scored):
            if len(floors) < CALIBRATION:
                # One that cannot be scored is reported when its turn comes.
                with contextlib.suppress(ValueError):
                    floors.append(noise_floor(engine, scorer, [sample]))
        floor = float(f"{max(floors, default=RESOLUTION):.3g}")
        self.console.print(f"noise floor {floor:.1e} nats per token ({self.settings['dtype']})")
        low = ", ".join(str(epsilon) for epsilon in self.epsilons if epsilon <= floor)
        if low:
            self.console.print(
                f"warning: the noise floor is above epsilon {low}: decisions there measure "
                "rounding; use --dtype float32 or a larger epsilon"
            )
        engine.reset()
        return floor

    def _feed(self, group: list[Source], originals: dict) -> Iterator[TokenTrajectory]:
        digests = {source.id: source.digest for source in group}
        for trajectory, tokens in self.survey.trajectories({s.line for s in group}):
            if digests.pop(tokens.id, None) != digest_of(tokens):
                raise ValueError(f"{self.survey.path} {CHANGED}")
            originals[tokens.id] = trajectory, tokens
            yield tokens
        if digests:
            raise ValueError(f"{self.survey.path} {CHANGED}")

    def _messages(self, trajectory: Trajectory, tokens: TokenTrajectory, gone: set[int]):
        """The compressed messages; none where token ids follow no format that can be read back."""
        if trajectory.messages:
            return self.survey.renderer.compress(trajectory, gone)
        try:
            return self.survey.renderer.decode(tokens, gone)
        except ValueError:
            return []

    def _record(self, cover, trajectory, tokens, digests, save_tokens) -> dict[str, Any]:
        renderer = self.survey.renderer
        gone = {t for t in range(len(tokens.turns)) if t in cover.removed}
        messages = self._messages(trajectory, tokens, gone)
        record = cover_record(
            cover,
            tokens,
            trajectory,
            messages,
            noise_floor=self.floor,
            opener=renderer.opener_len,
            save_tokens=save_tokens,
        )
        first = {
            "id": record.pop("id"),
            "model": self.settings["model"],
            "epsilon": record.pop("epsilon"),
            "dtype": self.settings["dtype"],
            "skip_form": self.settings["skip_form"],
        }
        return {
            **first,
            **record,
            "model_id": self.settings["model_id"],
            "input_id": digests[cover.id],
        }


def show(meter: Meter, before: Stats, stats: Stats) -> None:
    """Put the sum of earlier engines' and this engine's state on the meter."""
    total = before.plus(stats)
    rate = total.tokens / max(meter.spent, 1e-9)
    meter.update(total.work, f"{total.finished} done, {rate:,.0f} tokens/s")


def group_by_length(sources: list[Source], shortest: int = 2048) -> list[list[Source]]:
    """Groups that share a cache length, shortest first: powers of two from `shortest` on."""

    def bucket(source: Source) -> int:
        return max(shortest, 1 << (source.tokens - 1).bit_length())

    ordered = sorted(sources, key=lambda s: (bucket(s), s.line))
    return [list(group) for _, group in itertools.groupby(ordered, key=bucket)]


def read_lengths(survey: Survey, console: Console, limit: int | None, strict: bool) -> bool:
    """Read the input once and tell what is bad in it; False if the run is to stop there."""
    for problem in survey.load(limit):
        if survey.faults <= MOST_NAMED:
            console.print(visible(f"bad trajectory: {problem}"))
        if strict:
            console.print("stopped at the first bad trajectory, as --strict asks")
            return False
    if survey.faults > MOST_NAMED:
        console.print(
            f"... and {survey.faults - MOST_NAMED} more; race-jax trajectories check names them"
        )
    return True


def logic(
    model: str,
    trajectories: str,
    out: str,
    epsilon: str = "0.001",
    dtype: Literal["float32", "bfloat16"] = "float32",
    skip_form: SkipForm = "close",
    save_tokens: bool = False,
    max_trajectories: int | None = None,
    strict: bool = False,
    slots: int = 16,
    rows: int = 32,
    row_tokens: int = 16,
    lanes: int | None = None,
) -> int:
    """Run LoGiC over finished trajectories and write what it decided.

    Args:
        model: Hugging Face directory of a Qwen2, Qwen2.5 or Qwen3 checkpoint with its tokenizer.
        trajectories: JSONL of finished trajectories; see docs/trajectories.md for its forms.
        out: JSONL to append results to, one record per trajectory and threshold. A stopped run
            continues where it was.
        epsilon: Threshold in nats per token, or several separated by commas.
        dtype: Of the trunk, float32 or bfloat16. The head is float32 always.
        skip_form: How a removed block reads, close (as the policy samples it) or template (the
            model family's own empty block).
        save_tokens: Add the token ids of every segment to each record.
        max_trajectories: Take only the first so many usable trajectories.
        strict: Stop at the first bad trajectory.
        slots: Trajectories in flight at most; fewer where memory asks for it.
        rows: Rows forwarded per step at most.
        row_tokens: Tokens per row.
        lanes: Engines side by side, which share the slots; two on a CPU, one elsewhere.

    Returns:
        Exit code: 0, or 1 if any trajectory was bad.
    """
    # Ids and messages come from outside: what looks like markup in them is text.
    console = Console(highlight=False, soft_wrap=True, markup=False)
    epsilons = parse_epsilons(epsilon)
    if max_trajectories is not None and max_trajectories < 1:
        raise ValueError(f"--max-trajectories {max_trajectories}: it must be at least 1")
    lanes = default_lanes() if lanes is None else lanes
    if lanes < 1:
        raise ValueError(f"--lanes {lanes}: it must be at least 1")
    check_files(trajectories, out)
    config = load_config(model)
    family = family_of(config.model_type)
    renderer = renderer_for(load_tokenizer(model), family, skip_form=skip_form)
    settings = {
        "model": model,
        "model_id": model_fingerprint(model),
        "dtype": dtype,
        "skip_form": skip_form,
    }
    survey = Survey(trajectories, renderer, config.context_length, config.vocab_size)
    with JsonlLog(out, owns=lambda record: not find_fault(record)) as log:
        done = already_done(log, settings, epsilons, save_tokens)
        if not read_lengths(survey, console, max_trajectories, strict):
            return 1
        pending = still_pending(survey.sources, done, epsilons, out)
        console.print(
            f"{len(survey.sources)} trajectories, {sum(s.turns for s in survey.sources)} turns, "
            f"{sum(s.tokens for s in survey.sources):,} tokens; "
            f"{len(survey.sources) - len(pending)} already in {out}"
        )
        bad = survey.faults
        if pending:
            enable_compilation_cache()
            network = load_model(model, dtype=dtype)
            run = Run(survey, network, settings, epsilons, console, slots, rows, row_tokens, lanes)
            bad += run.write(log, pending, done, save_tokens=save_tokens, strict=strict)
        # Without the transcripts, which may be larger than memory.
        records = [{key: record.get(key) for key in TOTALS} for record in log.records()]
        if records:
            console.print(summary_table(records))
            console.print(visible(f"{out}; to read it: race-jax report {out} --out report.html"))
    if bad:
        console.print(f"{bad} bad trajectories were skipped")
    return 1 if bad else 0
