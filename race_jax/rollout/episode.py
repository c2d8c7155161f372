"""One episode as a state machine: what has happened so far, and what is to be done next.

It does nothing itself. Whoever drives it sends the `Request` that it asks for to a sampler, carries
out the `Action` in the environment, and hands back what came of it, until it gives a `Rollout`. The
ids that were sampled are its history: text is read from them, and none is encoded again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from race_jax.chat import Renderer
from race_jax.envs.base import Call, Step
from race_jax.rewards import format_reward
from race_jax.rollout.calls import checker_of, plain_calls, text_argument
from race_jax.rollout.jobs import Action, Job, Next, Opening
from race_jax.rollout.limits import (
    MAX_REPLY,
    RolloutConfig,
    StopReason,
    bound_text,
    request_seed,
)
from race_jax.rollout.manners import PLAIN, Manner, agreed, canonical
from race_jax.rollout.protocol import Completion, Request, SamplingConfig
from race_jax.rollout.results import Rollout, TurnNote
from race_jax.rollout.spans import Spans, split_sampled
from race_jax.tokenizer import spell
from race_jax.toolcalls import ParsedCall
from race_jax.trajectory_messages import short
from race_jax.turns import ParsedTurn
from race_jax.types import Message, TokenTrajectory, TokenTurn


class Episode:
    """The state of one episode.

    Args:
        job: Which one.
        renderer: Messages to ids.
        config: Limits and sampling.
        context_length: Most tokens that the sampler takes.
        manner: How the agent plays.
    """

    def __init__(
        self,
        job: Job,
        renderer: Renderer,
        config: RolloutConfig,
        context_length: int,
        manner: Manner = PLAIN,
    ):
        self.job, self.renderer, self.config, self.manner = job, renderer, config, manner
        self.room = min(config.max_tokens, context_length)
        self.last_call: Call | None = None
        self._stops = tuple(
            dict.fromkeys((renderer.end_of_turn, *renderer.codec.find("<|endoftext|>")))
        )
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._prompt: tuple[int, ...] = ()
        self._context: list[int] = []
        self._turns: list[TokenTurn] = []
        self._notes: list[TurnNote] = []
        self._calls = self._invalid_in_a_row = 0
        self._reward, self._success = 0.0, False
        # What text without a call is taken as, and what was written where the form counts.
        self._text_call: tuple[str, str] | None = None
        self._written: list[str] | None = None
        # The turn in hand: its ids, the calls still to be answered, and the replies so far.
        self._open: tuple[Spans, Completion] | None = None
        self._waiting: list[tuple[ParsedCall, str | None]] = []
        self._replies: list[Message] = []
        self._errors: list[str] = []
        self._carried = 0
        self._thought = False
        # What stands before the ids to be sampled without being the policy's own, and drafts.
        self._forced: tuple[int, ...] = ()
        self._drafts: list[Completion] | None = None
        self._drafted = 0
        self._prompted = True

    @property
    def turns(self) -> int:
        """How many turns are complete."""
        return len(self._turns)

    def begin(self, opening: Opening) -> Next:
        """Take the environment's opening."""
        try:
            own = tuple(tool.schema for tool in self.manner.tools)
            self._checker = checker_of((*opening.tools, *own))
            self._tools = (*opening.tools, *own)
            if opening.answer_tool:
                name = opening.answer_tool
                self._text_call = name, text_argument(self._tools, name)
            self._written = [] if opening.format_reward else None
            low, high = opening.reward_range
            self._reward = min(max(0.0, low), high)
            told = bound_text(opening.observation, self.config.max_observation)
            messages = [{"role": "user", "content": told}]
            system = "\n\n".join(text for text in (opening.system, self.manner.advice) if text)
            if system:
                messages.insert(0, {"role": "system", "content": system})
            self._prompt = self.renderer.prompt_ids(messages, self._tools)
        except ValueError as error:
            return self.end("env_error", f"the environment's opening is at fault: {error}")
        self._messages = messages
        self._context = list(self._prompt)
        return self._next_turn()

    def _next_turn(self) -> Next:
        """The first request for a turn."""
        self._drafts = [] if self.manner.drafts else None
        self._drafted, self._prompted = 0, not self._turns
        closed = self.manner.closed or self._drafts is not None
        return self._ask(self.renderer.skip_ids if closed else ())

    def _ask(self, forced: tuple[int, ...]) -> Next:
        """A request for the turn at hand, if there is room for one.

        Args:
            forced: Stands before what is sampled.
        """
        prompt = () if self._prompted else self.renderer.generation_prompt
        length = len(self._context) + len(prompt) + len(forced)
        room = min(self.config.max_turn_tokens, self.room - length)
        if room < 1:
            return self.end("length", f"{length} tokens of context leave no room in {self.room}")
        if prompt:
            last = self._turns[-1]
            self._turns[-1] = dataclasses.replace(last, observation=last.observation + prompt)
            self._context += prompt
        self._forced, self._prompted = forced, True
        job, draft = self.job, "" if self._drafts is None else f"#{len(self._drafts)}"
        greedy = job.greedy_from is not None and len(self._turns) >= job.greedy_from
        return Request(
            conversation=job.id + ("#draft" if draft else ""),
            prompt=(*self._context, *forced),
            max_tokens=room,
            stop=self._stops,
            seed=request_seed(
                self.config.seed, f"{job.env}/{job.task}{draft}", job.sample, len(self._turns)
            ),
            sampling=SamplingConfig(temperature=0.0) if greedy else self.config.sampling,
        )

    def sampled(self, completion: Completion) -> Next:
        """Take what the sampler gave for the request."""
        fault = _completion_fault(completion)
        if fault:
            return self.end("sampler_error", fault)
        if self._drafts is not None:
            return self._draft(completion)
        return self._take(completion)

    def _draft(self, completion: Completion) -> Next:
        """Take a draft; the last one decides."""
        assert self._drafts is not None
        self._drafts.append(completion)
        self._drafted += len(completion.tokens)
        if len(self._drafts) < self.manner.drafts:
            return self._ask(self._forced)
        chosen = agreed(self._drafts, self._action, self.manner.agreement)
        self._drafts = None
        if chosen is None:
            return self._ask(())
        self._drafted -= len(chosen.tokens)
        return self._take(chosen)

    def _action(self, draft: Completion) -> str | None:
        """What a draft would do, in canonical form; None if it cannot be carried out."""
        calls = self._calls_of(self._parse(draft))
        faults = [self._checker.fault(call) for call in calls]
        if self._is_truncated(draft) or not faults or any(faults):
            return None
        return canonical(calls)

    def _calls_of(self, parsed: ParsedTurn) -> tuple[ParsedCall, ...]:
        """The calls of a turn; text alone is one too where the environment takes it."""
        text = parsed.content.strip()
        if parsed.calls or parsed.error or not text or self._text_call is None:
            return parsed.calls
        name, argument = self._text_call
        return (ParsedCall("", name, {argument: text}, ""),)

    def _is_truncated(self, completion: Completion) -> bool:
        return completion.reason == "length" and completion.tokens[-1] not in self._stops

    def _parse(self, completion: Completion) -> ParsedTurn:
        ids = completion.tokens
        own = ids[:-1] if ids[-1] in self._stops else ids
        opened = False if self._forced else None
        return plain_calls(
            self.renderer.parse_turn(own, self._tools, opened=opened, first_call=self._calls + 1)
        )

    def _take(self, completion: Completion) -> Next:
        """Take a completion as the turn."""
        truncated, parsed = self._is_truncated(completion), self._parse(completion)
        if self._forced:
            spans = Spans((), self._forced, completion.tokens, True)
        else:
            spans = split_sampled(completion.tokens, self.renderer)
        self._calls += len(parsed.calls)
        self._messages.append(parsed.message())
        self._open = spans, completion
        self._replies, self._errors, self._carried, self._thought = [], [], 0, False
        calls = () if truncated and not parsed.calls else self._calls_of(parsed)
        self._waiting = [(call, self._refusal(n, call, truncated)) for n, call in enumerate(calls)]
        if self._written is not None:
            self._written.append(spell(self.renderer.codec.decode(completion.tokens)))
        if not calls:
            self._answer(None, self._no_call(parsed, truncated))
        return self._go_on()

    def _refusal(self, n: int, call: ParsedCall, truncated: bool) -> str | None:
        """Why call `n` of a turn is not carried out; None if it is."""
        if truncated:
            return f"not carried out: {self._cut_off()}"
        if n and self.config.calls_per_turn == "one":
            return "not carried out: one call per turn; make the next call in the next turn"
        return self._checker.fault(call)

    def _cut_off(self) -> str:
        return f"the turn was cut off at {len(self._taken().tokens)} tokens; be shorter"

    def _no_call(self, parsed: ParsedTurn, truncated: bool) -> str:
        if truncated:
            return self._cut_off()
        return parsed.error or "no tool was called; call one of the tools"

    def _taken(self) -> Completion:
        assert self._open is not None
        return self._open[1]

    def _answer(self, call: ParsedCall | None, error: str) -> None:
        """Answer what is not carried out, in a bounded message."""
        self._errors.append(error[:MAX_REPLY])
        self._reply(call, "Error: " + bound_text(error, MAX_REPLY))

    def _reply(self, call: ParsedCall | None, content: str) -> None:
        message: Message = {"role": "user", "content": content}
        if call is not None and call.id:
            message = {"role": "tool", "tool_call_id": call.id, "content": content}
            if call.name:
                message["name"] = call.name
        self._messages.append(message)
        self._replies.append(message)

    def _go_on(self) -> Next:
        """The next call of the turn in hand, or else the turn's end."""
        while self._waiting:
            call, refusal = self._waiting[0]
            own = self.manner.tool(call.name)
            if refusal is None:
                self.last_call = {"name": call.name, "arguments": dict(call.arguments)}
                if own is None:
                    return Action(self.last_call)
            self._waiting.pop(0)
            if refusal is not None or own is None:
                self._answer(call, str(refusal))
                continue
            self._carried += 1
            self._thought |= own.thought
            self._reply(call, own.reply)
            if own.ends:
                return self._finish()
        self._invalid_in_a_row = 0 if self._carried else self._invalid_in_a_row + 1
        return self._turn_over()

    def stepped(self, step: Step) -> Next:
        """Take what the environment made of the last `Action`."""
        call, _ = self._waiting.pop(0)
        self._carried += 1
        try:
            observation = bound_text(step.observation, self.config.max_observation)
            reward = _finite(step.reward)
        except (TypeError, ValueError) as error:
            return self.end("env_error", f"the environment's reply is at fault: {error}")
        self._reward, self._success = reward, bool(step.success)
        self._reply(call, observation)
        return self._finish() if step.done else self._go_on()

    def _finish(self) -> Rollout:
        """The episode is over by a call; those after it in the turn come too late."""
        for call, _ in self._waiting:
            self._answer(call, "not carried out: the episode is over")
        self._waiting = []
        return self.end("done")

    def _turn_over(self) -> Next:
        self._close_turn()
        if self._invalid_in_a_row >= self.config.max_invalid:
            return self.end("invalid_calls")
        if len(self._turns) >= self.config.max_turns:
            return self.end("max_turns")
        return self._next_turn()

    def _close_turn(self) -> None:
        """Put the turn in hand to the others."""
        assert self._open is not None
        spans, completion = self._open
        renderer = self.renderer
        # What the policy left out to end its turn is not its own, so it goes to the observation.
        forced = () if completion.tokens[-1] == renderer.end_of_turn else (renderer.end_of_turn,)
        observation: tuple[int, ...] = ()
        if self._replies:
            answer = renderer.observation_ids(self._replies)
            observation = forced + answer[: len(answer) - len(renderer.generation_prompt)]
        skip = renderer.skip_ids if spans.reasoning else spans.skip
        self._turns.append(TokenTurn(spans.reasoning, skip, spans.action, observation))
        reasoning = len(spans.reasoning) - renderer.opener_len if spans.reasoning else 0
        if self._thought or not spans.begun:
            reasoning = len(completion.tokens)
        self._notes.append(
            TurnNote(
                logprobs=completion.logprobs,
                reasoning_tokens=reasoning,
                truncated=completion.reason == "length",
                carried_out=self._carried,
                errors=tuple(self._errors),
                forced=len(self._forced),
                drafted=self._drafted,
            )
        )
        self._context += self._forced + completion.tokens + observation
        self._open = None

    def end(self, stop: StopReason, error: str | None = None) -> Rollout:
        """End the episode here; the reward is the environment's last.

        Args:
            stop: Why.
            error: More about it.
        """
        if self._open is not None:
            self._close_turn()
        if self._turns and len(self._context) > self.room:
            # No one reads what follows the last turn, so it need not break the limit.
            self._turns[-1] = dataclasses.replace(self._turns[-1], observation=())
        tokens = None
        if self._turns:
            tokens = TokenTrajectory(self.job.id, self._prompt, tuple(self._turns))
        fork = self.job.fork
        return Rollout(
            id=self.job.id,
            env=self.job.env,
            task=self.job.task,
            sample=self.job.sample,
            messages=tuple(self._messages),
            tools=self._tools,
            reward=self._reward * format_reward(self._written or (), ("tool_call",)),
            success=self._success,
            stop=stop,
            error=error,
            tokens=tokens,
            notes=tuple(self._notes),
            fork=None if fork is None else (fork.sample, len(fork.completions)),
        )


def _finite(reward: Any) -> float:
    """A reward as a number."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the reward is {short(reward)}; it must be a finite number")
    return value


def _completion_fault(completion: Completion) -> str | None:
    """What makes a completion unusable; None if nothing does."""
    if completion.reason == "error":
        return completion.error or "the request failed"
    if not completion.tokens:
        return f"the sampler returned no ids, and the reason {completion.reason!r}"
    if len(completion.logprobs) != len(completion.tokens):
        return (
            f"the sampler returned {len(completion.tokens)} ids and {len(completion.logprobs)} "
            "log-probs"
        )
    bad = next((value for value in completion.logprobs if not math.isfinite(value)), None)
    return None if bad is None else f"the sampler returned the log-prob {short(bad)}"
