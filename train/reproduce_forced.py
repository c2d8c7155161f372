"""Episodes in which some turns are made to go without reasoning: is it needed where it should be?

The potion shop says by its words whether a turn needs to look something up: after an order and at
an empty shelf it does, elsewhere it does not.
"""

from __future__ import annotations

import dataclasses

from race_jax.chat import Renderer
from race_jax.rollout.protocol import Completion, Request, Sampler
from race_jax.tokenizer import IM_START
from race_jax.train import story
from race_jax.train.evaluate_cli import EvaluateConfig
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
    """

    def force(sampler: Sampler, renderer: Renderer) -> ForcedSampler:
        return ForcedSampler(sampler, renderer, which)

    story.play(work, title, config, force, {"forced": which})
