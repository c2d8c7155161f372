"""What a run of cover-aware RL is made of: model, sampler, LoGiC, mesh, compiled functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from race_jax.chat import renderer_for
from race_jax.checkpoint import Checkpoints
from race_jax.families import family_of
from race_jax.logic.engine import Engine
from race_jax.logic.noise import noise_floor
from race_jax.logic.scoring import Scorer
from race_jax.logprobs import float32_head
from race_jax.metrics import check_trackers
from race_jax.models import load_config, make_model
from race_jax.packing import closing_id, decision_place
from race_jax.rl_data import task_order
from race_jax.rl_loss import actor_loss, actor_measures
from race_jax.rollout.results import OtherSettings, RolloutFile
from race_jax.sharding import sharding_for
from race_jax.tokenizer import load_tokenizer
from race_jax.train.optimizer import compute_params, make_optimizer, matrices, schedule
from race_jax.train.rl_config import FREE, PolicyRunConfig
from race_jax.train.rl_watch import closing_probe
from race_jax.train.runs import TrainingRun
from race_jax.train.runtime import enable_compilation_cache, make_folder, model_fingerprint
from race_jax.train.samplers import local_sampler
from race_jax.train.state import Trainee, TrainState
from race_jax.train.step import Arrays, Bounded, batch_logprobs, make_step, split_batch
from race_jax.types import Params, TokenTrajectory


class Run(TrainingRun):
    """A prepared run: what the loop steps through, and where its arrays lie."""

    def __init__(self, config: PolicyRunConfig):
        """Read settings and tokenizer; weights come with `start`.

        Raises:
            ValueError: Something does not fit; nothing has been written then.
            FileNotFoundError: A folder or file is missing.
        """
        if jax.process_count() > 1:
            raise ValueError("race-jax rl runs in one process; start it once, on one host.")
        super().__init__(config.model, config.out, config.mesh, config.compute, config.seed)
        self.config = config
        shape = load_config(config.model)
        tokenizer = load_tokenizer(config.model)
        self.renderer = renderer_for(
            tokenizer, family_of(shape.model_type), skip_form=config.skip_form
        )
        self.decision, self.closing = decision_place(self.renderer), closing_id(self.renderer)
        self.known = min(len(tokenizer), shape.vocab_size)
        if config.row_length > shape.context_length:
            raise ValueError(
                f"a row has {config.row_length} tokens, and the model's context has "
                f"{shape.context_length}; lower rollout.max_tokens or length."
            )
        part = (config.rows, config.row_length)
        name = "a micro-batch, rows x length"
        sharding_for(("batch", "time"), self.mesh, part, self.rules, name=name)
        env = config.env.maker()()
        try:
            self.env_name, self.tasks = env.name, env.tasks(config.split)
        finally:
            env.close()
        task_order(len(self.tasks), 0, 0, config.prompts)  # refuses a step with too many of them
        self.settings = {
            **dataclasses.asdict(config),
            "model_fingerprint": model_fingerprint(config.model),
        }
        self.model = make_model(shape, {})
        self.trainee = Trainee(self.model, {}, config.lora)
        updates = config.steps * config.epochs
        self.schedule = schedule(config.optimizer, updates)
        self.rule = make_optimizer(config.optimizer, updates, self.trainee.decayed)
        self._policies: dict[str, Callable[..., Params]] = {}
        self.step_of = functools.cache(self._make_step)
        self.scorer_of = functools.cache(self._make_scorer)

    def start(self, checkpoints: Checkpoints) -> TrainState:
        """The state to go on from, the last checkpoint's or a fresh one; sampler and LoGiC too.

        `notes` are the checkpoint's then, or empty.

        Raises:
            ValueError: The checkpoint is of a run with other settings.
        """
        config = self.config
        state, self.notes = self.begin(checkpoints, FREE)
        length = min(config.rollout.max_tokens, self.model.context_length)
        self.sampler = local_sampler(
            config.sampler,
            self.model,
            self.policy(state, config.sampler.dtype),
            config.rollout.max_tokens,
            self.known,
        )
        self.engine = Engine(
            self.model,
            self.policy(state, config.logic.dtype),
            length=length,
            slots=config.logic.slots,
            rows=config.logic.rows,
            row_tokens=config.logic.row_tokens,
        )
        self.scorer = Scorer(self.model, self.policy(state, "float32"))
        return state

    def noise_floor(self, state: TrainState, sample: TokenTrajectory) -> float:
        """How far LoGiC's likelihoods of one trajectory move with the order of the arithmetic.

        Nats per token, against an uncached pass in float32; LoGiC has the current policy already.

        Raises:
            ValueError: The trajectory cannot be scored.
        """
        params = self.policy(state, "float32")
        self.scorer.params, self.scorer.head = params, float32_head(self.model, params)
        return noise_floor(self.engine, self.scorer, [sample])

    def policy(self, state: TrainState, dtype: str) -> Params:
        """The current policy's parameters, matrices in `dtype`."""
        if dtype not in self._policies:
            wide = matrices(self.trainee.axes)

            def make(trained: Params, frozen: Params) -> Params:
                return compute_params(self.trainee.params(trained, frozen), wide, dtype)

            self._policies[dtype] = jax.jit(make)
        return self._policies[dtype](state.trained, self.frozen)

    def closure_at(self, step: int) -> float:
        """The closure loss's weight at a step, from 0."""
        loss = self.config.loss
        rise = round(loss.closure_warmup * self.config.steps)
        return loss.closure * min(step / rise, 1.0) if rise else loss.closure

    def _make_step(self, parts: int) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
        """The update on a batch of so many micro-batches."""
        loss = self.config.loss
        clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
        losses = functools.partial(
            actor_loss, **clips, reduction=loss.reduction, norm_length=loss.norm_length
        )
        limit = loss.closure_clip if loss.closure > 0 and self.config.logic.enabled else None
        closure = functools.partial(losses, terms="closure")
        bounded = None if limit is None else Bounded(closure, limit)
        return make_step(
            self.trainee,
            self.rule,
            functools.partial(losses, terms="policy" if bounded else "both"),
            dataclasses.replace(self.config.compute, micro_batches=parts),
            measure=functools.partial(actor_measures, **clips),
            probe=closing_probe(self.closing, self.config.compute),
            bounded=bounded,
            temperature=self.config.rollout.sampling.temperature,
        )

    def _make_scorer(self, parts: int) -> Callable[..., jax.Array]:
        """Log-probabilities float32 [B, T] of a batch's targets; 0 where there is no loss."""
        wide, compute = matrices(self.trainee.axes), self.config.compute
        temperature = self.config.rollout.sampling.temperature

        def score(trained: Params, frozen: Params, batch: Arrays, places: int) -> jax.Array:
            params = compute_params(self.trainee.params(trained, frozen), wide, compute.dtype)
            columns = jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape)

            def one(part: Arrays) -> jax.Array:
                found, picked = batch_logprobs(
                    self.trainee, params, part, places, compute, temperature
                )
                found = jnp.where(picked["loss_mask"], found, 0)
                rows = jnp.arange(len(found))[:, None]
                empty = jnp.zeros(part["tokens"].shape, jnp.float32)
                return empty.at[rows, picked["columns"]].set(found)

            scored = jax.lax.map(one, split_batch({**batch, "columns": columns}, parts))
            # `split_batch` deals rows out in turn; this takes them back in.
            return scored.swapaxes(0, 1).reshape(batch["tokens"].shape)

        return jax.jit(score, static_argnames="places")


def prepare(config: PolicyRunConfig) -> Run:
    """Check and gather all that a run needs, before anything is written."""
    enable_compilation_cache()
    check_trackers(config.track)
    run = Run(config)
    make_folder(run.folder)
    return run


def settings_of_step(run: Run, step: int, fingerprint: str) -> dict[str, Any]:
    """All that decides the rollouts of a step."""
    config = run.config
    given = {
        "rollout": dataclasses.asdict(config.rollout),
        "env": dataclasses.asdict(config.env) | {"workers": None, "restart_after": None},
        "split": config.split,
        "prompts": config.prompts,
        "seed": config.seed,
        "skip_form": config.skip_form,
        "sampler": config.sampler.dtype,
    }
    return {**given, "step": step, "policy": fingerprint}


@jax.jit
def _norms(trained: Any) -> tuple[jax.Array, jax.Array]:
    return optax.tree.norm(trained, ord=1), optax.tree.norm(trained)


def fingerprint(state: TrainState) -> str:
    """A name for the policy, which tells rollouts of another one apart."""
    return "-".join(float(value).hex() for value in _norms(state.trained))


def open_rollouts(path: Any, settings: Mapping[str, Any]) -> RolloutFile:
    """A step's file; one that another policy left, before a checkpoint was lost, is replaced."""
    try:
        return RolloutFile(path, settings)
    except OtherSettings:
        for old in (path, path.with_suffix(".failed.jsonl")):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        return RolloutFile(path, settings)
