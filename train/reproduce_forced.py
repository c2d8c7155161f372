"""Episodes in which some turns are made to go without reasoning: is it needed where it should be?

The potion shop says by its words whether a turn needs to look something up: after an order and at
an empty shelf it does, elsewhere it does not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from race_jax.chat import Renderer, renderer_for
from race_jax.rollout.jobs import Job
from race_jax.rollout.loop import Runner
from race_jax.rollout.protocol import Completion, Request, Sampler
from race_jax.rollout.results import RolloutFile
from race_jax.rollout.workers import make_host
from race_jax.tokenizer import IM_START, load_tokenizer
from race_jax.train.evaluate_cli import EvaluateConfig, spread
from race_jax.train.interrupt import stop_requests
from race_jax.train.samplers import make_sampler
from race_jax.train.workspace import Workspace

FORCED = ("needed", "redundant", "all")
ASKING = ("\nOrder:", "Served. Next order:", "The shelf is empty, there is no")
"""What the shop says before a turn that needs its reasoning; each is one token."""


class ForcedSampler:
    """A sampler that closes the block of some turns before the policy's first token.

    Args:
        inner: Samples.
        renderer: Of the sampler's model.
        which: Turns that are forced: `needed`, `redundant` or `all`.
    """

    def __init__(self, inner: Sampler, renderer: Renderer, which: str):
        if which not in FORCED:
            raise ValueError(f"there are no {which!r} turns; there are {', '.join(FORCED)}")
        self._inner, self._which = inner, which
        self._skip = tuple(renderer.skip_ids)
        (self._turn,) = renderer.codec.encode(IM_START)
        self._asking = {renderer.codec.encode(text)[0] for text in ASKING}
        self._closed: set[str] = set()

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self._inner.context_length

    def forces(self, prompt: tuple[int, ...]) -> bool:
        """Whether the turn after this prompt is made to go without reasoning."""
        starts = [i for i, token in enumerate(prompt) if token == self._turn]
        # The last one opens the turn; what was told stands after the one before.
        asked = bool(self._asking & set(prompt[starts[-2] :]))
        return self._which == "all" or asked == (self._which == "needed")

    def submit(self, request: Request) -> None:
        """Queue a request, behind a closed block if its turn is forced."""
        self._closed.discard(request.conversation)
        if self.forces(request.prompt):
            self._closed.add(request.conversation)
            request = dataclasses.replace(request, prompt=request.prompt + self._skip)
        self._inner.submit(request)

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """What is finished; a forced block stands in it as if it had been sampled for certain."""
        return [self._whole(done) for done in self._inner.poll(timeout)]

    def _whole(self, done: Completion) -> Completion:
        if done.conversation not in self._closed or done.reason == "error":
            return done
        certain = (0.0,) * len(self._skip)
        return dataclasses.replace(
            done, tokens=self._skip + done.tokens, logprobs=certain + done.logprobs
        )

    def forget(self, conversation: str) -> None:
        """Drop a conversation."""
        self._closed.discard(conversation)
        self._inner.forget(conversation)

    def close(self) -> None:
        """Free what the sampler holds."""
        self._inner.close()


def play_forced(work: Workspace, title: str, config: EvaluateConfig, which: str) -> None:
    """Evaluate with some turns forced, as a stage of the workspace; what was cut short goes on.

    Args:
        work: The workspace.
        title: The stage's.
        config: The evaluation.
        which: Turns that are forced: `needed`, `redundant` or `all`.

    Raises:
        RunFailed: Environment or sampler spoil everything.
    """
    out = str(Path(config.out).relative_to(work.path))
    settings = config.settings | {"count": config.count, "forced": which}

    def run() -> None:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(config.model)
        renderer = renderer_for(tokenizer, "qwen3")
        sampler = make_sampler(
            config.sampler, config.model, config.rollout.max_tokens, len(tokenizer)
        )
        host = make_host(config.env, config.rollout.step_timeout, config.at_once)
        with RolloutFile(config.out, settings) as file, stop_requests() as stop:
            forced = ForcedSampler(sampler, renderer, which)
            runner = Runner(forced, renderer, host, config.rollout, in_flight=config.at_once)
            try:
                jobs = [Job(config.env.name, task, 0) for task in _tasks(config)]
                for rollout in runner.run([j for j in jobs if j.id not in file.done], stop):
                    file.append(rollout)
            finally:
                host.close()
                sampler.close()
        if stop.is_set():
            raise KeyboardInterrupt

    work.stage(title, settings, (out,), run, unfinished=out)


def _tasks(config: EvaluateConfig) -> list[str]:
    env = config.env.maker()()
    try:
        return spread(env.tasks(config.split), config.count)
    finally:
        env.close()
