"""Chat endpoints by messages, for teachers and judges: any server that speaks OpenAI's protocol."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from race_jax.types import Message

if TYPE_CHECKING:
    from openai import OpenAI


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """An endpoint and how it is asked.

    Attributes:
        model: The model's name there.
        address: Base address, such as `http://127.0.0.1:8000/v1`; by default OpenAI's, or what
            `OPENAI_BASE_URL` says.
        temperature: Of sampling; None leaves it to the endpoint.
        max_tokens: Most tokens of a reply; None leaves it to the endpoint.
        timeout: Seconds for one reply.
        retries: How often a request that failed is sent again. Errors that the request itself is
            at fault for (HTTP 4xx but 408, 409 and 429) are not retried.
        concurrency: Requests at once, at least 1.
        extra: Further fields of each request, such as `{"seed": 1}`.
    """

    model: str
    address: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float = 600.0
    retries: int = 4
    concurrency: int = 16
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.model:
            raise ValueError("model is empty; it must be the model's name at the endpoint")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}; it must be above 0 seconds")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; it must be at least 0")
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class ChatReply:
    """What an endpoint answered.

    Attributes:
        message: The assistant's message, as trajectories hold it; None if the request failed.
        reason: The endpoint's finish reason, `stop`, `length` or `tool_calls` for instance.
        tokens: Tokens of the reply, 0 if the endpoint does not tell.
        error: What failed.
    """

    message: Message | None
    reason: str = ""
    tokens: int = 0
    error: str | None = None


class ChatApi:
    """A chat endpoint.

    The key is read from `OPENAI_API_KEY`; servers of one's own mostly want none.

    Args:
        config: The endpoint.

    Raises:
        ValueError: The package `openai` is missing.
    """

    def __init__(self, config: ChatConfig):
        self.config = config
        self._client = _client(config)

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatReply:
        """Send one chat; what fails is in the reply.

        Args:
            messages: The chat so far.
            tools: Tool schemas.
        """
        import openai
        from openai.types.chat import ChatCompletion

        config = self.config
        asked: dict[str, Any] = {"model": config.model, "messages": list(messages)}
        asked |= {"tools": list(tools)} if tools else {}
        asked |= {} if config.temperature is None else {"temperature": config.temperature}
        asked |= {} if config.max_tokens is None else {"max_tokens": config.max_tokens}
        refused = f"{self._client.base_url}: the reply is no chat completion"
        try:
            reply = self._client.chat.completions.create(**asked, extra_body=dict(config.extra))
            if not isinstance(reply, ChatCompletion) or not reply.choices:
                # The client passes on whatever the endpoint sends, a page in HTML too.
                what = f"but {str(reply)[:200]!r}; is the address that of the API?"
                return ChatReply(None, error=f"{refused} {what}"[:1000])
            choice = reply.choices[0]
            message = read_message(choice.message.model_dump(exclude_none=True))
            tokens = reply.usage.completion_tokens if reply.usage else 0
            return ChatReply(message, choice.finish_reason or "", tokens)
        except openai.OpenAIError as error:
            return ChatReply(None, error=f"{self._client.base_url}: {error}"[:1000])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return ChatReply(None, error=f"{refused}: {error!r}"[:1000])

    def ask_all(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[ChatReply]:
        """Send many chats at once; yields their replies in the order of the chats."""
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            yield from pool.map(lambda chat: self.ask(chat, tools), chats)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def read_message(raw: Mapping[str, Any]) -> Message:
    """An endpoint's message in the form of trajectories.

    Args:
        raw: With `content`, and where there are any, `tool_calls` and the reasoning, which servers
            call `reasoning_content` or `reasoning`.
    """
    message: Message = {
        "role": "assistant",
        "content": raw.get("content") or "",
        "reasoning_content": raw.get("reasoning_content") or raw.get("reasoning") or "",
    }
    calls = [
        {"id": call["id"], "type": "function", "function": dict(call["function"])}
        for call in raw.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _client(config: ChatConfig) -> OpenAI:
    try:
        from openai import OpenAI
    except ImportError:
        raise ValueError(
            "chat endpoints need the package openai; install it with pip install 'race-jax[api]'"
        ) from None
    # A server of one's own wants no key, but the client wants one to send.
    key = os.environ.get("OPENAI_API_KEY") or ("none" if config.address else None)
    if key is None:
        raise ValueError("OPENAI_API_KEY is not set; set it, or give the address of a server")
    return OpenAI(
        api_key=key,
        base_url=config.address,
        timeout=config.timeout,
        max_retries=config.retries,
    )
