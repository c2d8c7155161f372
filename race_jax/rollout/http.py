"""The sampler's protocol over HTTP: a vLLM or an SGLang server, by token ids."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from race_jax.envs.base import EnvironmentFault
from race_jax.envs.service import Service, ServiceFault
from race_jax.rollout.protocol import Completion, Request, SamplingConfig
from race_jax.trajectory_messages import short

Kind = Literal["vllm", "sglang"]
LogprobsMode = Literal["raw", "processed"]

_GREETING = 30.0
"""Most seconds that a server may take to name its model."""
_START = {
    "vllm": "start it with `vllm serve MODEL --port PORT`",
    "sglang": "start it with `python -m sglang.launch_server --model-path MODEL --port PORT`",
}


class HttpSampler:
    """Continues conversations on a server, which keeps their prefixes in a cache of its own.

    Requests carry ids and bring ids, never text. One that fails is sent again with growing pauses,
    unless the server says that the request is at fault (HTTP 4xx but 408 and 429), and in the
    end becomes a completion with the reason `error`. Requests that are forgotten run on at the
    server until they are finished or late; what comes of them is dropped.

    vLLM returns log-probs at temperature 1 unless it was started with
    `--logprobs-mode processed_logprobs`; SGLang returns them at the sampling temperature.

    Args:
        kind: `vllm` (from 0.10.2 on, which returns token ids) or `sglang`.
        address: Such as `http://127.0.0.1:8000`.
        logprobs_mode: What a vLLM server was started with: `raw` by default, or `processed`.
        context_length: Most tokens of prompt and completion; by default what the server says.
        known: The tokenizer's length. A completion with an id from here on is an error: servers
            sample from the padding of the head too. By default nothing is checked.
        concurrency: Requests at once, from 1 to 100.
        timeout: Seconds for one request.
        attempts: How often a request is sent at most.
        pause: Seconds before the second attempt; each later pause is twice as long.

    Raises:
        ValueError: A setting is out of range.
        ConnectionError: No server answers at the address, or it is of another kind.
    """

    def __init__(
        self,
        kind: Kind,
        address: str,
        *,
        logprobs_mode: LogprobsMode = "raw",
        context_length: int | None = None,
        known: int | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        attempts: int = 4,
        pause: float = 0.5,
    ):
        if kind not in _START:
            raise ValueError(f"the kind of server is {kind!r}; it must be 'vllm' or 'sglang'")
        if not 1 <= concurrency <= 100:
            raise ValueError(f"concurrency is {concurrency}; it must be from 1 to 100")
        self.kind: Kind = kind
        self.logprobs_mode = logprobs_mode
        self._known = known
        # What listens and says nothing is found out soon, however long completions may take.
        self._service = Service(
            address, min(timeout, _GREETING), min(attempts, 2), pause, _START[kind]
        )
        self.model, self.context_length = self._greet(context_length)
        self._service = Service(address, timeout, attempts, pause, _START[kind])
        self._waiting: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
        self._numbers: dict[str, int] = {}
        self._submitted = 0
        self._closed = threading.Event()
        # Daemons, because a request that hangs must not keep the program from ending.
        for _ in range(concurrency):
            threading.Thread(target=self._work, daemon=True).start()

    def _greet(self, context_length: int | None) -> tuple[str, int]:
        """Name and context length of the server's model."""
        try:
            self._service.check()
            models = self._service.get("/v1/models")
            model = models["data"][0]
            length = context_length or model.get("max_model_len")
            name = model["id"]
        except EnvironmentFault as fault:
            raise ConnectionError(str(fault)) from None
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConnectionError(
                f"{self._service.address}/v1/models names no model; is it a {self.kind} server?"
            ) from None
        if not isinstance(length, int) or length < 2:
            raise ValueError(
                f"{self._service.address} does not tell its context length; give context_length"
            )
        return name, length

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: The server cannot return the log-probs that the protocol asks for under this
                sampling.
        """
        self._check_sampling(request.sampling)
        self._submitted += 1
        self._numbers[request.conversation] = self._submitted
        self._waiting.put((self._submitted, request))

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        if self.kind != "vllm":
            return
        if self.logprobs_mode == "raw" and sampling.temperature not in (0.0, 1.0):
            raise ValueError(
                f"temperature is {sampling.temperature}, but this vLLM server returns log-probs "
                "at temperature 1; start it with `--logprobs-mode processed_logprobs` and set "
                "logprobs_mode to processed"
            )
        if self.logprobs_mode == "processed" and (sampling.top_p < 1 or sampling.top_k):
            raise ValueError(
                "with processed log-probs vLLM leaves out what top_p and top_k leave out; set "
                "top_p to 1 and top_k to 0, or use raw log-probs at temperature 1"
            )

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """Wait until something is finished, `timeout` seconds have passed, or nothing is queued."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found: list[Completion] = []
        while self._numbers:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                number, completion = self._finished.get(not found, None if found else left)
            except queue.Empty:
                break
            if self._numbers.get(completion.conversation) == number:
                del self._numbers[completion.conversation]
                found.append(completion)
        return found

    def forget(self, conversation: str) -> None:
        """Drop a conversation's request; its prefix stays in the server's cache while it may."""
        self._numbers.pop(conversation, None)

    def close(self) -> None:
        """Give up all requests."""
        self._numbers.clear()
        self._closed.set()

    def update_from(self, directory: str | Path) -> None:
        """Let the server load new weights of the same model.

        SGLang does so by itself; vLLM must have been started with `VLLM_SERVER_DEV_MODE=1`.

        Args:
            directory: A Hugging Face directory that the server can read.

        Raises:
            ValueError: Requests are queued or running, or the server refuses.
            ConnectionError: The server failed.
        """
        if self._numbers:
            raise ValueError(f"{len(self._numbers)} requests are running; poll them first")
        path = str(Path(directory).resolve())
        try:
            if self.kind == "sglang":
                body = {"model_path": path, "flush_cache": True}
                reply = self._service.post("/update_weights_from_disk", body, again=True)
                if not isinstance(reply, Mapping) or reply.get("success") is not True:
                    raise ValueError(f"the server did not load {path}: {short(reply, 300)}")
                return
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            self._post_to_vllm("/collective_rpc", body)
            # What the old weights put into the cache would be taken for the new ones'.
            self._post_to_vllm("/reset_prefix_cache", {})
        except ServiceFault as fault:
            if fault.status is not None and 400 <= fault.status < 500:
                raise ValueError(f"the server did not load {path}: {fault}") from None
            raise ConnectionError(str(fault)) from None

    def _post_to_vllm(self, route: str, body: Mapping[str, Any]) -> None:
        try:
            self._service.post(route, body, again=True)
        except ServiceFault as fault:
            if fault.status == 404:
                raise ValueError(
                    f"{fault}; start the server with VLLM_SERVER_DEV_MODE=1 to let it load weights"
                ) from None
            if fault.status != 200:  # vLLM answers some of these with an empty body.
                raise

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                number, request = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            if self._numbers.get(request.conversation) == number:
                self._finished.put((number, self._complete(request)))

    def _complete(self, request: Request) -> Completion:
        """Send one request; whatever fails is in the completion."""
        name = request.conversation
        try:
            if self.kind == "vllm":
                body = vllm_body(request, self.model)
                reply = self._service.post("/v1/completions", body, again=True)
                tokens, logprobs, reason = read_vllm(reply, request)
            else:
                reply = self._service.post("/generate", sglang_body(request), again=True)
                tokens, logprobs, reason = read_sglang(reply)
            self._check_ids(tokens, request)
        except (EnvironmentFault, ValueError) as fault:
            return Completion(name, (), (), "error", str(fault)[:1000])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = f"the reply of {self._service.address} lacks a part: {error!r}"
            return Completion(name, (), (), "error", what[:1000])
        except Exception as error:  # Or else this thread ends, and the request is never answered.
            what = f"the reply of {self._service.address} cannot be read: {error!r}"
            return Completion(name, (), (), "error", what[:1000])
        return Completion(name, tokens, logprobs, reason)

    def _check_ids(self, tokens: Sequence[int], request: Request) -> None:
        if len(tokens) > request.max_tokens:
            raise ValueError(
                f"the server returned {len(tokens)} ids; at most {request.max_tokens} were wanted"
            )
        if self._known is not None and max(tokens) >= self._known:
            raise ValueError(
                f"the server sampled id {max(tokens)}, but the tokenizer's ids end at "
                f"{self._known - 1}; is it the same model?"
            )


def vllm_body(request: Request, model: str) -> dict[str, Any]:
    """A request as vLLM's completion route takes it.

    What the model's generation_config.json would set is set here, so that it sets nothing.
    """
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "stop_token_ids": list(request.stop),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 1,
        "return_token_ids": True,
    }


Read = tuple[tuple[int, ...], tuple[float, ...], Literal["stop", "length"]]


def read_vllm(reply: Any, request: Request) -> Read:
    """Ids, log-probs and reason of vLLM's reply.

    Raises:
        ValueError: The reply is not what was asked for.
    """
    choice = reply["choices"][0]
    if choice.get("token_ids") is None:
        raise ValueError("the server returned no token ids; use vLLM 0.10.2 or later")
    sent = choice.get("prompt_token_ids")
    if sent is not None and tuple(sent) != request.prompt:
        raise ValueError(
            f"the server continued another prompt, of {len(sent)} ids instead of "
            f"{len(request.prompt)}"
        )
    return _checked(
        choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
    )


def sglang_body(request: Request) -> dict[str, Any]:
    """A request as SGLang's native route takes it."""
    sampling = request.sampling
    return {
        "input_ids": list(request.prompt),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stop),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            # It counts where the server runs with --enable-deterministic-inference.
            "sampling_seed": request.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def read_sglang(reply: Any) -> Read:
    """Ids, log-probs and reason of SGLang's reply.

    Raises:
        ValueError: The reply is not what was asked for.
    """
    meta = reply["meta_info"]
    pairs = meta["output_token_logprobs"]
    reason = meta["finish_reason"]
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind == "abort":
        raise ValueError(f"the server gave the request up: {short(reason.get('message'), 300)}")
    return _checked([pair[1] for pair in pairs], [pair[0] for pair in pairs], kind)


def _checked(tokens: Sequence[Any], logprobs: Sequence[Any], reason: Any) -> Read:
    if len(tokens) != len(logprobs):
        raise ValueError(f"the server returned {len(tokens)} ids and {len(logprobs)} log-probs")
    if not tokens or any(type(token) is not int or token < 0 for token in tokens):
        raise ValueError(f"the server returned the ids {short(list(tokens))}")
    if any(not isinstance(value, int | float) for value in logprobs):
        raise ValueError(f"the server returned the log-probs {short(list(logprobs))}")
    if reason not in ("stop", "length"):
        raise ValueError(f"the server ended for the reason {short(reason)}")
    return tuple(tokens), tuple(map(float, logprobs)), reason
