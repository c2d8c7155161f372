"""ADaPT: an executor tries a task; only where it fails, a planner splits it, and so on downwards.

Every attempt and every plan is a conversation of its own, which begins with what has to be known;
all act in one episode of the environment. Prasad et al., ADaPT: As-Needed Decomposition and
Planning with Language Models, 2024.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from race_jax.chat import Renderer
from race_jax.envs.base import Call, Step
from race_jax.rollout.episode import Episode
from race_jax.rollout.jobs import Job, Next, Opening
from race_jax.rollout.limits import RolloutConfig, StopReason
from race_jax.rollout.manners import Manner, OwnTool
from race_jax.rollout.protocol import Completion
from race_jax.rollout.results import Rollout

MAX_STEPS = 5
"""Most steps of a plan."""


def _tool(name: str, purpose: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": purpose, "parameters": parameters},
    }


FINISH = OwnTool(
    _tool(
        "finish",
        "Say that your part is done, or that you cannot do it.",
        {
            "success": {"type": "boolean", "description": "Whether it is done."},
            "summary": {"type": "string", "description": "What you did and what you found out."},
        },
    ),
    "Noted.",
    ends=True,
)
PLAN = OwnTool(
    _tool(
        "plan",
        "Split the part into steps.",
        {
            "steps": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "maxItems": MAX_STEPS,
                "description": "Each can be understood without the others.",
            },
            "logic": {
                "type": "string",
                "enum": ["and", "or"],
                "description": "and: all steps in order; or: until one of them works.",
            },
        },
    ),
    "Noted.",
    ends=True,
)

EXECUTOR = Manner(
    advice="Do the part that you are given, and nothing beyond it. When it is done, or when you "
    "see that you cannot do it, call finish.",
    tools=(FINISH,),
)
PLANNER = Manner(
    advice="Another agent tried the part below and failed. You do not act yourself: split the part "
    f"into at most {MAX_STEPS} simpler steps for that agent, and call plan.",
    tools=(PLAN,),
)


@dataclasses.dataclass
class _Goal:
    """A part of the task.

    Attributes:
        text: What is to be done; empty for the whole task.
        steps: Its plan, if it was split.
        logic: Whether all steps are needed or one.
        at: Which step is at work.
    """

    text: str
    steps: tuple[str, ...] = ()
    logic: Literal["and", "or"] = "and"
    at: int = 0


class AdaptEpisode:
    """The state of one episode that is played by executor and planner; used as an `Episode`.

    Args:
        job: Which one.
        renderer: Messages to ids.
        config: Limits and sampling; `max_turns` bounds the turns of all conversations together.
        context_length: Most tokens that the sampler takes.
        depth: Levels of the task, at least 1; parts at the last one are not split.
        attempt_turns: Most turns of one attempt, at least 1.
    """

    def __init__(
        self,
        job: Job,
        renderer: Renderer,
        config: RolloutConfig,
        context_length: int,
        *,
        depth: int = 3,
        attempt_turns: int = 10,
    ):
        self.job, self.renderer, self.config = job, renderer, config
        self._context_length = context_length
        self._depth, self._attempt_turns = depth, attempt_turns
        self._goals: list[_Goal] = [_Goal("")]
        self._parts: list[Rollout] = []
        self._told = self._summary = ""
        self._reward, self._success = 0.0, False
        self._planning = False
        self._part: Episode | None = None

    def begin(self, opening: Opening) -> Next:
        """Take the environment's opening."""
        low, high = opening.reward_range
        self._reward = min(max(0.0, low), high)
        self._opening = opening
        self._told = opening.observation
        return self._attempt()

    def sampled(self, completion: Completion) -> Next:
        """Take what the sampler gave for the request."""
        return self._after(self._at_work.sampled(completion))

    def stepped(self, step: Step) -> Next:
        """Take what the environment made of the last `Action`."""
        following = self._at_work.stepped(step)
        if isinstance(following, Rollout) and following.stop == "env_error":
            return self._close(following, "env_error", following.error)
        self._told = step.observation
        self._reward, self._success = float(step.reward), bool(step.success)
        if step.done and isinstance(following, Rollout):
            return self._close(following, "done")
        return self._after(following)

    def end(self, stop: StopReason, error: str | None = None) -> Rollout:
        """End the episode here."""
        part = self._part or Episode(self.job, self.renderer, self.config, self._context_length)
        return self._close(part.end(stop, error), stop, error)

    @property
    def _at_work(self) -> Episode:
        assert self._part is not None
        return self._part

    def _close(self, last: Rollout, stop: StopReason, error: str | None = None) -> Rollout:
        first, *others = [*self._parts, last]
        return dataclasses.replace(
            first,
            reward=self._reward,
            success=self._success,
            stop=stop,
            error=error,
            parts=tuple(part for part in others if part.tokens is not None),
        )

    def _start(self, manner: Manner, opening: Opening, turns: int) -> Next:
        """Begin a conversation."""
        number = len(self._parts) + 1
        job = self.job if number == 1 else self.job._replace(task=f"{self.job.task}#{number}")
        config = dataclasses.replace(self.config, max_turns=turns)
        self._part = Episode(job, self.renderer, config, self._context_length, manner)
        return self._after(self._at_work.begin(opening))

    @property
    def _left(self) -> int:
        """Turns that are left."""
        return self.config.max_turns - sum(len(part.notes) for part in self._parts)

    def _attempt(self) -> Next:
        """Let the executor try the goal at hand."""
        self._planning = False
        goal = self._goals[-1].text
        told = self._opening.observation
        if goal:
            told = (
                f"The whole task:\n{told}\n\nYour part of it:\n{goal}\n\n"
                f"What was seen last:\n{self._told}"
            )
        turns = min(self._attempt_turns, self._left)
        return self._start(EXECUTOR, self._opening._replace(observation=told), turns)

    def _plan(self) -> Next:
        """Let the planner split the goal at hand."""
        self._planning = True
        goal = self._goals[-1].text or "The whole task."
        told = (
            f"The whole task:\n{self._opening.observation}\n\nThe part:\n{goal}\n\n"
            f"What was seen last:\n{self._told}\n\nWhat the agent says:\n{self._summary}"
        )
        tools = ", ".join(tool["function"]["name"] for tool in self._opening.tools)
        told += f"\n\nThe agent's tools: {tools}"
        opening = self._opening._replace(tools=(), observation=told, answer_tool="")
        return self._start(PLANNER, opening, min(self.config.max_invalid, self._left))

    def _after(self, following: Next) -> Next:
        """Go on after a conversation, if it is over."""
        if not isinstance(following, Rollout):
            return following
        if following.faulty:
            return self._close(following, following.stop, following.error)
        call = self._at_work.last_call if following.stop == "done" else None
        self._parts.append(following)
        if self._left < 1:
            return self._over("max_turns")
        if self._planning:
            return self._split(call)
        arguments = {} if call is None else call["arguments"]
        self._summary = str(arguments.get("summary", f"It was stopped: {following.stop}."))
        if arguments.get("success") is True:
            return self._resolve(True)
        return self._plan() if len(self._goals) < self._depth else self._resolve(False)

    def _split(self, call: Call | None) -> Next:
        """Take the plan, and attempt its first step."""
        if call is None:
            return self._resolve(False)
        goal = self._goals[-1]
        goal.steps = tuple(call["arguments"]["steps"])
        goal.logic = call["arguments"]["logic"]
        self._goals.append(_Goal(goal.steps[0]))
        return self._attempt()

    def _resolve(self, done: bool) -> Next:
        """The goal at hand is done, or has failed for good: go on with the one above it."""
        self._goals.pop()
        while self._goals:
            goal = self._goals[-1]
            goal.at += 1
            # The next step is wanted after a success under `and`, after a failure under `or`.
            if done == (goal.logic == "and") and goal.at < len(goal.steps):
                self._goals.append(_Goal(goal.steps[goal.at]))
                return self._attempt()
            self._goals.pop()
        return self._over("done")

    def _over(self, stop: StopReason) -> Rollout:
        return self._close(self._parts.pop(), stop)
