"""Samplers over real HTTP: stand-ins that answer as vLLM and SGLang do, and what can go wrong."""

import threading

import pytest
from env_servers import broken, cut, dropped, free_port, html, saying, serving, slow
from rollout_samples import potion_oracle, word_renderer

from race_jax.envs.potions import PotionShop
from race_jax.rollout.hosts import LocalHost
from race_jax.rollout.http import HttpSampler
from race_jax.rollout.jobs import Job
from race_jax.rollout.limits import RolloutConfig
from race_jax.rollout.loop import Runner
from race_jax.rollout.protocol import Request, SamplingConfig

ROUTE = {"vllm": "/v1/completions", "sglang": "/generate"}
KINDS = sorted(ROUTE)


def vllm_reply(body, ids, logprobs, reason):
    logprobs = {"token_logprobs": logprobs, "tokens": ["x"] * len(ids), "top_logprobs": []}
    choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}
    choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"], "stop_reason": None}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def sglang_reply(body, ids, logprobs, reason):
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    meta = {"id": "1", "finish_reason": {"type": reason}, "output_token_logprobs": pairs}
    return {"text": "", "output_ids": ids, "meta_info": meta}


def answers(kind, play=lambda prompt, limit: ([7, 9], "stop")):
    """A server of this kind, that continues prompts by `play(prompt, limit)`."""

    def answer(method, route, body):
        if route == "/v1/models":
            return {"object": "list", "data": [{"id": "toy", "max_model_len": 5000}]}
        if route == "/v1/completions":
            ids, reason = play(body["prompt"], body["max_tokens"])
            return vllm_reply(body, ids, [-0.5] * len(ids), reason)
        if route == "/generate":
            ids, reason = play(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            return sglang_reply(body, ids, [-0.5] * len(ids), reason)
        if route == "/update_weights_from_disk":
            return {"success": body["model_path"] != "/bad", "message": "as you see"}
        if route == "/collective_rpc":
            return {"results": [None]}
        raise LookupError(route)

    return answer


def request(name="a", prompt=(1, 2, 3), **changes):
    given = {"max_tokens": 20, "stop": (9,), "seed": 11, **changes}
    return Request(name, prompt, **given)


def sampler_of(server, kind, **changes):
    return HttpSampler(
        kind, server.address, **{"timeout": 1.0, "pause": 0.01, "concurrency": 8, **changes}
    )


def drain(sampler):
    found = []
    while len(found) < 100:
        new = sampler.poll(10.0)
        if not new:
            return found
        found += new
    raise AssertionError("no end")


def test_what_is_asked_of_vllm():
    with serving(answers("vllm")) as server:
        sampler = sampler_of(server, "vllm")
        assert (sampler.context_length, sampler.model) == (5000, "toy")
        sampler.submit(request(sampling=SamplingConfig(1.0, 0.9, 50)))
        (found,) = drain(sampler)
        assert (found.tokens, found.logprobs, found.reason) == ((7, 9), (-0.5, -0.5), "stop")
        body = server.seen[-1][2]
        assert (body["prompt"], body["max_tokens"], body["seed"]) == ([1, 2, 3], 20, 11)
        assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 0.9, 50)
        assert (body["stop_token_ids"], body["return_token_ids"]) == ([9], True)
        assert body["logprobs"] is not None and body["skip_special_tokens"] is False


def test_what_is_asked_of_sglang():
    with serving(answers("sglang")) as server:
        sampler = sampler_of(server, "sglang")
        sampler.submit(request(sampling=SamplingConfig(0.7)))
        (found,) = drain(sampler)
        assert (found.tokens, found.logprobs, found.reason) == ((7, 9), (-0.5, -0.5), "stop")
        body = server.seen[-1][2]
        params = body["sampling_params"]
        assert (body["input_ids"], body["return_logprob"]) == ([1, 2, 3], True)
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 1.0, -1)
        assert (params["stop_token_ids"], params["sampling_seed"]) == ([9], 11)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_runs_over_a_server(kind):
    words = word_renderer()
    oracle, lock, turns = potion_oracle(words), threading.Lock(), {}

    def play(prompt, limit):
        with lock:
            # The server knows no conversations: it tells them by how their prompts begin.
            name = next(t for t, ids in openings.items() if tuple(prompt[: len(ids)]) == ids)
            turn = turns[name] = turns.get(name, -1) + 1
            ids = oracle(Request(f"potions/{name}/0", (1,), 1, (), 0), turn)
        return list(ids), "stop"

    openings = {}
    for task in ("0", "1", "2"):
        world = PotionShop()
        told = [
            {"role": "system", "content": world.system},
            {"role": "user", "content": world.reset(task)},
        ]
        openings[task] = words.prompt_ids(told, world.tools)
    with serving(answers(kind, play)) as server:
        server.faults[ROUTE[kind]] = [broken, dropped, cut]
        sampler = sampler_of(server, kind, timeout=20.0, concurrency=3)
        runner = Runner(sampler, words, LocalHost(PotionShop), RolloutConfig())
        rollouts = list(runner.run([Job("potions", task, 0) for task in openings]))
        sampler.close()
    assert [r.error for r in rollouts] == [None] * 3
    assert [(r.stop, r.success) for r in rollouts] == [("done", True)] * 3
    assert all(set(note.logprobs) == {-0.5} for r in rollouts for note in r.notes)


def busy(handler):
    handler.reply(429, b'{"error": "too many requests"}')


def garbled(handler):
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", "5")
    handler.end_headers()
    handler.wfile.write(b"plain")


PASSING = [broken, dropped, cut, slow, busy, garbled]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_are_tried_again(kind, fault):
    with serving(answers(kind)) as server:
        sampler = sampler_of(server, kind, timeout=0.5)
        server.faults[ROUTE[kind]] = [fault]
        sampler.submit(request())
        (found,) = drain(sampler)
        assert found.reason == "stop"
        assert server.routes().count(ROUTE[kind]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_failed_request_is_a_completion_and_the_others_live(kind):
    def play(prompt, limit):
        if prompt[0] == 5:
            raise RuntimeError("this one fails always")
        return [9], "stop"

    with serving(answers(kind, play)) as server:
        sampler = sampler_of(server, kind, attempts=2)
        for n in range(4):
            sampler.submit(request(str(n), (5 if n == 2 else 1, n)))
        found = {completion.conversation: completion for completion in drain(sampler)}
        assert [found[str(n)].reason for n in range(4)] == ["stop", "stop", "error", "stop"]
        assert server.address in found["2"].error and "500" in found["2"].error
        assert (found["2"].tokens, found["2"].logprobs) == ((), ())
        assert server.routes().count(ROUTE[kind]) == 5


def refused(handler):
    handler.reply(400, b'{"error": {"message": "the prompt is too long"}}')


def bad_vllm(**changes):
    reply = vllm_reply({"prompt": [1, 2, 3]}, [7, 9], [-0.5, -0.5], "stop")
    choice = reply["choices"][0] | changes
    return saying({"choices": [choice]})


def bad_sglang(**changes):
    reply = sglang_reply({}, [7, 9], [-0.5, -0.5], "stop")
    return saying({"meta_info": reply["meta_info"] | changes})


FINAL = [
    ("vllm", refused, "the prompt is too long"),
    ("sglang", refused, "the prompt is too long"),
    ("vllm", html, "no JSON"),
    ("sglang", html, "no JSON"),
    ("vllm", saying({"choices": []}), "lacks a part"),
    ("sglang", saying([1, 2]), "lacks a part"),
    ("vllm", bad_vllm(token_ids=None), "use vLLM 0.10.2 or later"),
    ("vllm", bad_vllm(token_ids=[7]), "1 ids and 2 log-probs"),
    ("vllm", bad_vllm(token_ids=[], logprobs={"token_logprobs": []}), "the ids []"),
    ("vllm", bad_vllm(prompt_token_ids=[2, 3]), "another prompt, of 2 ids instead of 3"),
    ("vllm", bad_vllm(logprobs={"token_logprobs": [None, -1.0]}), "the log-probs [None"),
    ("vllm", bad_vllm(logprobs={"token_logprobs": [-(10**400), -1.0]}), "cannot be read"),
    ("vllm", bad_vllm(token_ids=[7, 50]), "sampled id 50, but the tokenizer's ids end at 49"),
    ("vllm", bad_vllm(finish_reason="abort"), "'abort'"),
    ("sglang", bad_sglang(output_token_logprobs=[[-1.0, "x", None]]), "the ids ['x']"),
    ("sglang", bad_sglang(finish_reason={"type": "abort", "message": "no room"}), "no room"),
]


@pytest.mark.parametrize(("kind", "fault", "message"), FINAL)
def test_faults_that_do_not_pass_are_not_tried_again(kind, fault, message):
    with serving(answers(kind)) as server:
        sampler = sampler_of(server, kind, known=50)
        server.faults[ROUTE[kind]] = [fault]
        sampler.submit(request())
        (found,) = drain(sampler)
        assert found.reason == "error" and message in found.error
        assert server.routes().count(ROUTE[kind]) == 1


def test_more_ids_than_were_asked_for_are_an_error():
    with serving(answers("vllm", lambda prompt, limit: ([7] * (limit + 1), "length"))) as server:
        sampler = sampler_of(server, "vllm")
        sampler.submit(request())
        (found,) = drain(sampler)
        assert found.reason == "error" and "ids; at most" in found.error


def test_a_server_that_listens_and_says_nothing_is_told_soon(monkeypatch):
    monkeypatch.setattr("race_jax.rollout.http._GREETING", 0.2)
    with serving(answers("vllm")) as server:
        server.faults["/v1/models"] = [slow, slow]
        with pytest.raises(ConnectionError, match=rf"{server.address}.*within 0.2 s in 2 attempts"):
            sampler_of(server, "vllm", timeout=600.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_down_fails_at_once_with_its_address(kind):
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"{address}.*start it with"):
        HttpSampler(kind, address)


def test_another_kind_of_server_is_told():
    with (
        serving(lambda method, route, body: {"hello": 1}) as server,
        pytest.raises(ConnectionError, match="names no model; is it a vllm server"),
    ):
        HttpSampler("vllm", server.address)
    with (
        serving(lambda method, route, body: {"data": [{"id": "x"}]}) as server,
        pytest.raises(ValueError, match="give context_length"),
    ):
        HttpSampler("sglang", server.address)


def test_what_is_forgotten_does_not_come_back():
    gate = threading.Event()

    def play(prompt, limit):
        gate.wait(10)
        return [9], "stop"

    with serving(answers("vllm", play)) as server:
        sampler = sampler_of(server, "vllm", timeout=20.0)
        sampler.submit(request("a"))
        sampler.submit(request("b"))
        assert sampler.poll(0.05) == []
        sampler.forget("a")
        gate.set()
        assert [completion.conversation for completion in drain(sampler)] == ["b"]
        assert sampler.poll(None) == []
        sampler.close()


def test_log_probs_that_would_mean_something_else_are_refused():
    with serving(answers("vllm")) as server:
        raw = sampler_of(server, "vllm")
        for temperature in (0.0, 1.0):
            raw.submit(request(sampling=SamplingConfig(temperature, 0.9)))
        with pytest.raises(ValueError, match="processed_logprobs"):
            raw.submit(request(sampling=SamplingConfig(0.5)))
        processed = sampler_of(server, "vllm", logprobs_mode="processed")
        processed.submit(request(sampling=SamplingConfig(0.5)))
        for sampling in (SamplingConfig(top_p=0.9), SamplingConfig(top_k=5)):
            with pytest.raises(ValueError, match="set top_p to 1"):
                processed.submit(request(sampling=sampling))


def test_new_weights_are_loaded_from_a_directory(tmp_path):
    with serving(answers("sglang")) as server:
        sampler = sampler_of(server, "sglang")
        sampler.update_from(tmp_path)
        assert server.seen[-1][2]["model_path"] == str(tmp_path)
        with pytest.raises(ValueError, match=r"did not load /bad.*as you see"):
            sampler.update_from("/bad")
    with serving(answers("vllm")) as server:
        sampler = sampler_of(server, "vllm")
        server.faults["/reset_prefix_cache"] = [lambda handler: handler.reply(200, b"")]
        sampler.update_from(tmp_path)
        assert server.routes()[-2:] == ["/collective_rpc", "/reset_prefix_cache"]
        assert server.seen[-2][2] == {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(tmp_path)},
        }
        server.faults["/collective_rpc"] = [lambda handler: handler.reply(404, b"Not Found")]
        with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
            sampler.update_from(tmp_path)
        server.faults[ROUTE["vllm"]] = [slow]
        sampler.submit(request())
        with pytest.raises(ValueError, match="1 requests are running"):
            sampler.update_from(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"concurrency": 0}, "concurrency is 0"), ({"timeout": 0}, "timeout is 0")],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        HttpSampler("vllm", "http://127.0.0.1:1", **changes)
    with pytest.raises(ValueError, match="kind of server is 'tgi'"):
        HttpSampler("tgi", "http://127.0.0.1:1")
