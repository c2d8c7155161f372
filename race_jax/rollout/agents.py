"""The agents that methods are compared with: prompts, tools and procedures around one model."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from race_jax.chat import Renderer
from race_jax.rollout.adapt import AdaptEpisode
from race_jax.rollout.episode import Episode
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.manners import PLAIN, Manner, OwnTool

AgentKind = Literal["plain", "direct", "react", "sparse_react", "think_tool", "dart", "adapt"]

THINK = OwnTool(
    {
        "type": "function",
        "function": {
            "name": "think",
            "description": "Think something through. It changes nothing and tells nothing new.",
            "parameters": {
                "type": "object",
                "properties": {"thought": {"type": "string", "description": "Your reasoning."}},
                "required": ["thought"],
            },
        },
    },
    "",
    thought=True,
)

_MANNERS = {
    "plain": PLAIN,
    "direct": Manner(closed=True),
    "react": Manner(advice="Reason before every call: what do you know, and what follows from it?"),
    "sparse_react": Manner(
        advice="Reason only where it is needed, to plan, to choose or to find a way out. Where the "
        "next call is plain from what you know, close your reasoning at once and make the call."
    ),
    "think_tool": Manner(
        advice="Where a turn needs reasoning, call think first; elsewhere act at once.",
        tools=(THINK,),
        closed=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """Which agent plays, around the same model.

    Attributes:
        kind: `plain`: the model as it is. `direct`: every turn begins with closed reasoning, so the
            model acts at once; for models that know no thinking too. `react`: told to reason at
            every turn. `sparse_react`: told that it may skip. `think_tool`: as `direct`, with a
            tool that takes thoughts; the tokens of those turns count as reasoning. `dart`: several
            turns are drafted without reasoning, and only where they disagree the model thinks.
            `adapt`: an executor tries, and only where it fails, a planner splits the task.
        drafts: Of `dart`, at least 2.
        agreement: Share of the drafts that must agree in `dart`, in (0, 1].
        depth: Levels of the task in `adapt`, at least 1.
        attempt_turns: Most turns of one attempt in `adapt`, at least 1.

    Reference: RACE section 4, baselines.
    """

    kind: AgentKind = "plain"
    drafts: int = 3
    agreement: float = 1.0
    depth: int = 3
    attempt_turns: int = 10

    def __post_init__(self):
        if self.kind not in get_args(AgentKind):
            raise ValueError(
                f"there is no agent {self.kind!r}; there are {', '.join(get_args(AgentKind))}"
            )
        if self.drafts < 2:
            raise ValueError(
                f"drafts is {self.drafts}; it must be at least 2, for one cannot agree"
            )
        if not 0 < self.agreement <= 1:
            raise ValueError(f"agreement is {self.agreement}; it must be in (0, 1]")
        for name in ("depth", "attempt_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def episode(
        self, job: Job, renderer: Renderer, config: RolloutConfig, context_length: int
    ) -> Episode | AdaptEpisode:
        """A new episode of this agent; arguments as those of `Episode`."""
        if self.kind == "adapt":
            return AdaptEpisode(
                job,
                renderer,
                config,
                context_length,
                depth=self.depth,
                attempt_turns=self.attempt_turns,
            )
        if self.kind == "dart":
            manner = Manner(drafts=self.drafts, agreement=self.agreement)
        else:
            manner = _MANNERS[self.kind]
        return Episode(job, renderer, config, context_length, manner)
