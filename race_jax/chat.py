r"""Chats as token segments: one renderer per model family, messages to ids and back.

Every family's generation prompt opens the thinking block here, `<|im_start|>assistant\n<think>\n`.
The policy then samples `r\n</think>\n\n` and its action, or closes at once with `</think>\n\n` and
acts. Reasoning and action are encoded each on its own, so that a turn has the same ids in scoring,
fine-tuning and sampling, and taking reasoning out changes no other id. Unlike the families' own
templates, no renderer drops the reasoning of earlier turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from race_jax.families import FAMILIES, Family, family_of, read_system, system_block
from race_jax.messages import check_roles, split_message, split_reasoning, text_of
from race_jax.tokenizer import (
    END_RESPONSE,
    END_THINK,
    IM_END,
    IM_START,
    RESPONSE,
    THINK,
    Codec,
    mark_tags,
    spell,
)
from race_jax.toolcalls import Tools, check_tools, render_call
from race_jax.turns import MESSAGE, OPENER, ParsedTurn, number_calls, parse_marked, read_history
from race_jax.types import Message, TokenTrajectory, TokenTurn, Trajectory, is_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["ParsedTurn", "Renderer", "SkipForm", "family_of", "renderer_for"]

SkipForm = Literal["close", "template"]

_ASSISTANT = f"{IM_START}assistant\n"
_CLOSER = f"{END_THINK}\n\n"
_EMPTY_BLOCK = f"{THINK}\n\n{END_THINK}\n\n"


def renderer_for(
    tokenizer: PreTrainedTokenizerFast, family: str, *, skip_form: SkipForm = "close"
) -> Renderer:
    """The renderer of a family.

    Args:
        tokenizer: As `race_jax.tokenizer.load_tokenizer` returns it.
        family: `qwen2_5`, `qwen3` or `qwen3_5`; `family_of` finds it from a checkpoint's
            `model_type`.
        skip_form: How a removed block reads. `close`: the ids that the policy samples when it
            closes the block at once. `template`: the family's own empty block.

    Raises:
        ValueError: Unknown family or skip form, or a tokenizer without the control tokens.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown chat family {family!r}; known are {', '.join(FAMILIES)}")
    if skip_form not in ("close", "template"):
        raise ValueError(f"skip_form is {skip_form!r}; it must be 'close' or 'template'")
    return Renderer(FAMILIES[family], Codec(tokenizer), skip_form)


@dataclasses.dataclass(frozen=True)
class Renderer:
    r"""Messages to token segments and back, for one family.

    With `skip_form="close"` the generation prompt includes the opener `<think>\n`. With
    `skip_form="template"` the opener belongs to the segment that follows it, reasoning or skip,
    because the family's empty block begins with other ids than the opener does.

    Attributes:
        family: The chat format.
        codec: Text to ids.
        skip_form: How a removed block reads.
    """

    family: Family
    codec: Codec
    skip_form: SkipForm = "close"

    @property
    def generation_prompt(self) -> tuple[int, ...]:
        """Ids that come before a turn's first own token."""
        return self.codec.encode(_ASSISTANT + ("" if self._opener else OPENER))

    @property
    def skip_ids(self) -> tuple[int, ...]:
        """Ids of a turn's removed reasoning."""
        return self.codec.encode(_CLOSER if self.skip_form == "close" else _EMPTY_BLOCK)

    @property
    def opener_len(self) -> int:
        """How many ids at the start of a reasoning segment are the opener, not reasoning."""
        return len(self.codec.encode(self._opener))

    @property
    def end_of_turn(self) -> int:
        """Id of `<|im_end|>`, which ends every action."""
        return self.codec.id_of(IM_END)

    @property
    def end_of_reasoning(self) -> int:
        """Id of `</think>`."""
        return self.codec.id_of(END_THINK)

    @property
    def _opener(self) -> str:
        return "" if self.skip_form == "close" else OPENER

    def encode(self, trajectory: Trajectory) -> TokenTrajectory:
        """A trajectory as token segments.

        Args:
            trajectory: As messages, or as ids. Those stay as they were sampled; only the opener
                moves to where this renderer has it, and skip ids become this renderer's.

        Raises:
            ValueError: There is no turn, a turn has no action, or a message cannot be rendered;
                names trajectory and turn.
        """
        try:
            if trajectory.tokens is not None:
                return self._align(trajectory.tokens)
            messages = trajectory.messages
            check_tools(trajectory.tools)
            check_roles(messages)
            turns = [n for n, message in enumerate(messages) if is_turn(message)]
            if not turns:
                raise ValueError("it has no assistant turn, so no action to score")
            prompt = self.prompt_ids(messages[: turns[0]], trajectory.tools)
            ends = [*turns[1:], len(messages)]
            rendered = [
                self._turn(number, messages, begin, end)
                for number, (begin, end) in enumerate(zip(turns, ends, strict=True), 1)
            ]
        except ValueError as error:
            raise ValueError(f"trajectory {trajectory.id!r}: {error}") from error
        return TokenTrajectory(trajectory.id, prompt, tuple(rendered))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Ids of what precedes the first turn, through its generation prompt.

        Args:
            messages: System, user and tool messages, and assistant messages that are no turns.
            tools: Tool schemas.
        """
        check_roles(messages)
        system, begin = None, 0
        if messages and messages[0]["role"] == "system":
            begin = 1
            try:
                system = text_of(messages[0])
            except ValueError as error:
                raise ValueError(f"message 1: {error}") from error
        block = system_block(self.family, system, tools)
        return self.codec.encode(block + self._history(messages, begin)) + self.generation_prompt

    def observation_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids between a turn's `<|im_end|>` and the next turn's first own token.

        Args:
            messages: What the environment answered, as tool or user messages.
        """
        return self._observation(messages) + self.generation_prompt

    def _observation(self, messages: Sequence[Message], begin: int = 0) -> tuple[int, ...]:
        return self.codec.encode("\n" + self._history(messages, begin))

    def _turn(self, number: int, messages: Sequence[Message], begin: int, end: int) -> TokenTurn:
        """Turn `number`, taken by message `begin` and observed up to before message `end`."""
        try:
            reasoning, action = self._assistant(messages[begin])
            if not action.removesuffix(IM_END).strip():
                raise ValueError("its action is empty: neither content nor tool calls")
            thought = f"{self._opener}{reasoning}\n{_CLOSER}"
            observation = ()
            if begin + 1 < end or end < len(messages):
                observation = self._observation(messages[:end], begin + 1)
            if end < len(messages):
                observation += self.generation_prompt
            return TokenTurn(
                self.codec.encode(thought) if reasoning else (),
                self.skip_ids,
                self.codec.encode(action),
                observation,
            )
        except ValueError as error:
            raise ValueError(f"turn {number}: {error}") from error

    def _assistant(self, message: Message) -> tuple[str, str]:
        """Reasoning, and the marked action, of an assistant message."""
        parts = split_message(message)
        content = self.family.trim_content(parts.content)
        form = self.family.call_form
        calls = "\n".join(render_call(name, arguments, form) for name, arguments in parts.calls)
        gap = self.family.call_gap if content and calls else ""
        return self.family.trim_reasoning(parts.reasoning), content + gap + calls + IM_END

    def _history(self, messages: Sequence[Message], begin: int = 0) -> str:
        """The marked string of messages from `begin` on, none of them a turn."""
        parts: list[str] = []
        for n in range(begin, len(messages)):
            try:
                parts.append(self._context_message(messages, n, begin))
            except ValueError as error:
                raise ValueError(f"message {n + 1}: {error}") from error
        return "".join(parts)

    def _context_message(self, messages: Sequence[Message], n: int, begin: int) -> str:
        """Message `n` as a marked string; tool replies in a row share one user block."""
        message, role = messages[n], messages[n].get("role")
        if is_turn(message):
            raise ValueError("it is a turn of the policy; use `encode`, or give it `loss` false")
        if role == "assistant":
            reasoning, action = self._assistant(message)
            thought = f"{OPENER}{reasoning}\n{_CLOSER}" if reasoning else ""
            return f"{_ASSISTANT}{thought}{action}\n"
        text = self.family.trim_other(text_of(message))
        if role == "user":
            return f"{IM_START}user\n{text}{IM_END}\n"
        if role != "tool":
            raise ValueError(f"a message of role {role!r} cannot stand here")
        first = n == begin or messages[n - 1]["role"] != "tool"
        last = n + 1 == len(messages) or messages[n + 1]["role"] != "tool"
        head, tail = f"{IM_START}user" if first else "", f"{IM_END}\n" if last else ""
        return f"{head}\n{RESPONSE}\n{text}\n{END_RESPONSE}{tail}"

    def _align(self, tokens: TokenTrajectory) -> TokenTrajectory:
        """Bring ids that were sampled elsewhere into this renderer's layout; none is re-encoded."""
        if not tokens.turns:
            raise ValueError("it has no assistant turn, so no action to score")
        contexts = [tokens.prompt, *(turn.observation for turn in tokens.turns[:-1])]
        before: list[tuple[int, ...]] = []
        turns: list[TokenTurn] = []
        for number, (context, turn) in enumerate(zip(contexts, tokens.turns, strict=True), 1):
            try:
                context, turn = self._align_turn(context, turn)
            except ValueError as error:
                raise ValueError(f"turn {number}: {error}") from error
            before.append(context)
            turns.append(turn)
        after = [*before[1:], tokens.turns[-1].observation]
        turns = [
            dataclasses.replace(turn, observation=observation)
            for turn, observation in zip(turns, after, strict=True)
        ]
        return TokenTrajectory(tokens.id, before[0], tuple(turns))

    def _align_turn(
        self, context: tuple[int, ...], turn: TokenTurn
    ) -> tuple[tuple[int, ...], TokenTurn]:
        """Context and turn with the opener on the side where this renderer has it."""
        opener = self.codec.encode(OPENER)
        opened = context[-len(opener) :] == opener
        base = context[: -len(opener)] if opened else context
        assistant = self.codec.encode(_ASSISTANT)
        if base[-len(assistant) :] != assistant:
            raise ValueError(
                "the ids before it do not end in the generation prompt "
                f"{spell(_ASSISTANT + OPENER)!r}, with or without its last tag and newline"
            )
        if not turn.action:
            raise ValueError("its action is empty")
        forms = ((), self.codec.encode(_CLOSER), self.codec.encode(_EMPTY_BLOCK))
        own = self.codec.encode(self._opener)

        def move(ids: tuple[int, ...], what: str) -> tuple[int, ...]:
            if not opened and ids[: len(opener)] != opener:
                raise ValueError(f"no {spell(OPENER)!r} comes before its {what} or begins it")
            return own + (ids if opened else ids[len(opener) :])

        reasoning = turn.reasoning
        if reasoning:
            thought, closed, _ = self.codec.decode(reasoning).partition(END_THINK)
            if not closed:
                raise ValueError(f"its reasoning holds no {spell(END_THINK)}")
            if thought.replace(THINK, "").strip():
                reasoning = move(reasoning, "reasoning")
            else:  # An empty block, whatever it was called: a turn without reasoning.
                reasoning, turn = (), dataclasses.replace(turn, reasoning=(), skip=reasoning)
        skip = self.skip_ids
        if not reasoning and turn.skip not in forms:
            skip = move(turn.skip, "empty block")
        aligned = TokenTurn(reasoning, skip, turn.action, turn.observation)
        return (base if self._opener else base + opener), aligned

    def decode(
        self, tokens: TokenTrajectory, removed: Collection[int] = (), tools: Tools | None = None
    ) -> list[Message]:
        """Read token segments back as messages, the inverse of `encode`.

        Args:
            tokens: The segments, laid out as `encode` lays them out.
            removed: Turn indices (from 0) whose reasoning is left out.
            tools: Tool schemas for the types of XML arguments; by default those in the prompt.

        Returns:
            The messages: every assistant message has `reasoning_content`, arguments are
            mappings, calls are numbered `call_1`, `call_2`, ... and replies take their ids.

        Raises:
            ValueError: The prompt or an observation is not in this family's format.
        """
        prompt = self.codec.decode(tokens.prompt)
        messages, found = self._read_prompt(self._without_prompt(prompt))
        tools = found if tools is None else tools
        for t, turn in enumerate(tokens.turns):
            thought = self.codec.decode(turn.reasoning[self.opener_len :])
            parsed = parse_marked(
                thought + self.codec.decode(turn.action), bool(thought), self.family, tools
            )
            message = parsed.message()
            if t in removed:
                message["reasoning_content"] = ""
            messages.append(message)
            observation = self.codec.decode(turn.observation)
            if t + 1 < len(tokens.turns):
                observation = self._without_prompt(observation)
            messages += read_history(observation.removeprefix("\n"), self.family, tools)
        return number_calls(messages)

    def _without_prompt(self, marked: str) -> str:
        prompt = _ASSISTANT + ("" if self._opener else OPENER)
        if not marked.endswith(prompt):
            raise ValueError(f"the ids before a turn do not end in {spell(prompt)!r}")
        return marked[: -len(prompt)]

    def _read_prompt(self, marked: str) -> tuple[list[Message], Tools]:
        """The messages of a prompt, and the tool schemas that its system message holds."""
        block = MESSAGE.match(marked)
        if block is None or block[1] != "system":
            return read_history(marked, self.family, ()), ()
        system, tools = read_system(self.family, block[2])
        first = [] if system is None else [{"role": "system", "content": spell(system)}]
        return first + read_history(marked[block.end() :], self.family, tools), tools

    def parse_turn(
        self,
        output: str | Sequence[int],
        tools: Tools = (),
        *,
        opened: bool | None = None,
        first_call: int = 1,
    ) -> ParsedTurn:
        """Read what a policy sampled in one turn; what is wrong with it is `error`, never raised.

        The first `</think>` ends the reasoning if the generation prompt opened a block, or the
        output begins with one. Any other is a quotation.

        Args:
            output: Sampled ids, or the text a server returned. Ids are safer: in them a quoted
                tag differs from a real one.
            tools: Tool schemas, for the types of XML arguments.
            opened: Whether the generation prompt opened the block; by default as this renderer's
                does.
            first_call: Number of the first call, for its id.
        """
        marked = mark_tags(output) if isinstance(output, str) else self.codec.decode(output)
        opened = self.skip_form == "close" if opened is None else opened
        begin = marked.lstrip()
        if begin.startswith(THINK):
            opened, marked = True, begin.removeprefix(THINK)
        return parse_marked(marked, opened, self.family, tools, first_call)

    def compress(self, trajectory: Trajectory, removed: Collection[int]) -> list[Message]:
        """A trajectory's messages with empty `reasoning_content` at every SKIP turn.

        Args:
            trajectory: The trajectory, as messages or as ids.
            removed: Turn indices (from 0) whose reasoning goes.

        Returns:
            New messages; contents, calls and other keys are as they were.
        """
        if not trajectory.messages and trajectory.tokens is not None:
            return self.decode(self._align(trajectory.tokens), removed)
        messages: list[Message] = []
        turn = 0
        for message in trajectory.messages:
            message = dict(message)
            messages.append(message)
            if not is_turn(message):
                continue
            reasoning, content = split_reasoning(message)
            if turn in removed or not self.family.trim_reasoning(reasoning):
                if content != text_of(message):  # the reasoning stood inside the content
                    message["content"] = content
                message.pop("reasoning", None)
                message["reasoning_content"] = ""
            turn += 1
        return messages
