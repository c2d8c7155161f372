"""The sampler against a loop that forwards the whole sequence for each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.logprobs import token_logprobs
from race_jax.models import ModelConfig, init_model
from race_jax.models.sampler import LocalSampler
from race_jax.rollout.protocol import Completion, Request, SamplingConfig
from race_jax.sampling import Rule, draw, uniforms

KNOWN, WIDTH, STOP = 50, 61, 3
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": WIDTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
HYBRID = {
    **SHAPE,
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
MODELS = {
    name: init_model(ModelConfig.from_hf(x), 0)
    for name, x in (("qwen3", SHAPE), ("qwen3_5", HYBRID))
}
families = pytest.mark.parametrize("family", list(MODELS))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


PROGRAMS = ("_decode", "_extend", "_read", "_write", "_read_states", "_write_states")
_first = {}


def sampler(family, params=None, **settings):
    """A sampler that shares the compiled programs of the others of its family."""
    model = MODELS[family]
    settings = {"slots": 3, "length": 200, **settings}
    made = LocalSampler(model, params or model.params, known=KNOWN, chunk=16, burst=4, **settings)
    for name in PROGRAMS:
        setattr(made, name, getattr(_first.setdefault(family, made), name))
    return made


_forward = {
    name: jax.jit(
        lambda tokens, model=model: model.forward(
            model.params,
            tokens,
            jnp.arange(tokens.shape[1])[None],
            jnp.ones_like(tokens),
        )
    )
    for name, model in MODELS.items()
}


def states(family, ids):
    """Hidden states float32 [T, D] of a sequence, in one shape."""
    padded = np.zeros((1, 224), np.int32)
    padded[0, : len(ids)] = ids
    return _forward[family](padded)[0, : len(ids)]


_draw, _uniforms = jax.jit(draw, static_argnums=3), jax.jit(uniforms)


def alone(family, request):
    """A request token by token, each with the whole sequence forwarded anew."""
    model = MODELS[family]
    head = model.head(model.params)
    rule = request.sampling
    ids, nats = list(request.prompt), []
    rows = Rule(
        jnp.array([rule.temperature]), jnp.array([rule.top_p]), jnp.array([rule.top_k], jnp.int32)
    )
    key = jnp.array([[request.seed >> 32, request.seed & 0xFFFFFFFF]], jnp.uint32)
    while True:
        logits = jnp.matmul(states(family, ids)[-1:], head.T, precision="highest")
        token, nat = _draw(logits, rows, _uniforms(key, jnp.array([len(nats)])), KNOWN)
        ids.append(int(token[0]))
        nats.append(float(nat[0]))
        if ids[-1] in request.stop:
            return Completion(request.conversation, tuple(ids[-len(nats) :]), tuple(nats), "stop")
        if len(nats) == request.max_tokens or len(ids) == 200:
            return Completion(request.conversation, tuple(ids[-len(nats) :]), tuple(nats), "length")


def same(got, want):
    assert (got.conversation, got.tokens, got.reason) == (
        want.conversation,
        want.tokens,
        want.reason,
    )
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    assert got.error is None


def finish(sampler):
    """All completions by conversation."""
    found = {}
    while done := sampler.poll():
        found |= {c.conversation: c for c in done}
    return found


def prompt(rng, size):
    return tuple(rng.integers(4, KNOWN, size).tolist())


RULES = [
    SamplingConfig(),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.6, top_p=0.9, top_k=20),
    SamplingConfig(temperature=1.3, top_p=0.8),
]


@families
def test_a_conversation_of_several_turns_equals_forwarding_all_of_it(rng, family):
    """Chunks of 16 against prompts of 1, 15, 16, 17, 33: on, before and behind their ends."""
    engine = sampler(family)
    for n, size in enumerate((1, 15, 16, 17, 33)):
        ids = prompt(rng, size)
        for turn in range(4):
            rule = RULES[turn]
            request = Request(f"c{n}", ids, 6 + 5 * turn, (STOP, 7), 1000 * n + turn, rule)
            engine.submit(request)
            (got,) = engine.poll()
            same(got, alone(family, request))
            ids += got.tokens + prompt(rng, int(rng.integers(1, 20)))
        engine.forget(f"c{n}")


@families
def test_no_prefix_is_forwarded_twice(rng, family):
    engine = sampler(family)
    ids, seen = prompt(rng, 40), 0
    for turn in range(5):
        engine.submit(Request("c", ids, 8, (), turn))
        (got,) = engine.poll()
        ids += got.tokens
        seen = len(ids) - 1  # the last token is not in the cache
        assert engine.stats.prefilled + engine.stats.sampled == seen
        ids += prompt(rng, 11)


@families
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_same_request_gives_the_same_tokens_whatever_else_runs(rng, family, slots):
    """Eight conversations of three turns in any number of slots, which start and end raggedly."""
    sizes = rng.integers(1, 60, 8)
    prompts = [prompt(rng, size) for size in sizes]
    replies = [[prompt(rng, int(rng.integers(1, 12))) for _ in range(2)] for _ in prompts]

    def request(n, turn, ids):
        most = int(3 + (5 * n + 3 * turn) % 11)
        return Request(f"c{n}", ids, most, (STOP, 7), 100 * n + turn, RULES[n % len(RULES)])

    apart = {}
    engine = sampler(family, slots=slots)
    for n, ids in enumerate(prompts):
        for turn in range(3):
            engine.submit(request(n, turn, ids))
            (apart[n, turn],) = engine.poll()
            if turn < 2:
                ids += apart[n, turn].tokens + replies[n][turn]
        engine.forget(f"c{n}")

    engine = sampler(family, slots=slots)
    at = {n: (0, ids) for n, ids in enumerate(prompts)}
    for n in at:
        engine.submit(request(n, *at[n]))
    while done := engine.poll():
        for got in done:
            n = int(got.conversation[1:])
            turn, ids = at[n]
            assert got == apart[n, turn]
            if turn < 2:
                at[n] = turn + 1, ids + got.tokens + replies[n][turn]
                engine.submit(request(n, *at[n]))
    assert all(turn == 2 for turn, _ in at.values())
    # With fewer slots than conversations, idle ones make room and come back.
    assert (engine.stats.parked > 0) == (slots < 8)


@families
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_that_begin_alike_are_forwarded_once(rng, family, rows):
    begin = prompt(rng, 70)
    ids = [begin + prompt(rng, size) for size in (1, 9, 30)]
    requests = [Request(f"c{n}", x, 9, (), n) for n, x in enumerate(ids)]
    engine, apart = sampler(family, rows=rows), sampler(family, rows=rows, share_prompts=False)
    for request in requests:
        engine.submit(request)
    found = finish(engine)
    for request in requests:
        apart.submit(request)
        assert found[request.conversation] == finish(apart)[request.conversation]
    # 70 tokens are four whole chunks of 16 and a rest; a recurrent state cannot be cut off there.
    assert engine.stats.shared == (0 if family == "qwen3_5" else 2 * 64)


@families
def test_log_probabilities_are_the_trainers(rng, family):
    model = MODELS[family]
    engine = sampler(family)
    for n in range(4):
        rule = SamplingConfig(temperature=(1.0, 0.6, 1.5, 1.0)[n], top_p=0.9 if n == 3 else 1.0)
        engine.submit(Request(f"c{n}", prompt(rng, 20 + n), 30, (), n, rule))
        (got,) = engine.poll()
        ids = engine._chats[f"c{n}"].ids
        hidden = states(family, ids)[-len(got.tokens) - 1 : -1] / rule.temperature
        want = token_logprobs(hidden, model.head(model.params), jnp.asarray(got.tokens))
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)
        assert max(got.tokens) < KNOWN


@families
def test_a_history_that_was_changed_is_forwarded_from_where_it_differs(rng, family):
    engine = sampler(family)
    first = Request("c", prompt(rng, 50), 8, (), 1)
    engine.submit(first)
    engine.poll()
    before = engine.stats.prefilled
    request = Request("c", first.prompt[:30] + prompt(rng, 10), 8, (), 2)
    engine.submit(request)
    same(engine.poll()[0], alone(family, request))
    assert engine.stats.prefilled - before == (39 if family == "qwen3_5" else 9)
    # The same prompt again: the last token has to be forwarded for its logits.
    engine.submit(request)
    same(engine.poll()[0], alone(family, request))


@families
def test_a_conversation_ends_at_its_own_limit_the_samplers_or_a_stop_id(rng, family):
    engine = sampler(family, length=40)
    engine.submit(Request("limit", prompt(rng, 10), 5, (), 0))
    engine.submit(Request("room", prompt(rng, 35), 50, (), 0))
    engine.submit(Request("full", prompt(rng, 40), 50, (), 0))
    engine.submit(Request("stop", prompt(rng, 10), 5, tuple(range(8)), 0, SamplingConfig(top_k=0)))
    found = finish(engine)
    assert (len(found["limit"].tokens), found["limit"].reason) == (5, "length")
    assert (len(found["room"].tokens), found["room"].reason) == (5, "length")
    assert found["full"] == Completion("full", (), (), "length")
    stop = found["stop"]
    assert (stop.reason == "stop") == (stop.tokens[-1] < 8)


def test_what_cannot_be_asked_for_is_refused(rng):
    engine = sampler("qwen3")
    engine.submit(Request("c", prompt(rng, 5), 3, (), 0))
    with pytest.raises(ValueError, match="conversation 'c' has an open request: poll it or forget"):
        engine.submit(Request("c", prompt(rng, 5), 3, (), 0))
    with pytest.raises(ValueError, match="a request has 9 stop ids: at most 8"):
        engine.submit(Request("d", (4,), 3, tuple(range(9)), 0))
    with pytest.raises(ValueError, match="1 requests are open, 'c' among them: poll or forget"):
        engine.update(MODELS["qwen3"].params)
    engine.submit(Request("bad", (4, 61), 3, (), 0))
    (bad,) = engine.poll()
    assert (
        bad.reason == "error"
        and bad.error == "the prompt holds id 61, but the model's ids are 0 to 60"
    )
    assert len(finish(engine)["c"].tokens) == 3
    for settings, message in (
        ({"slots": 0}, "slots is 0: it must be at least 1"),
        ({"length": 257}, "length is 257 tokens, but the model's context is 256"),
        ({"known": 62}, "known is 62: it must be from 1 to 61"),
        ({"chunk": 24}, "chunk is 24: it must be a power of two of at least 16"),
    ):
        with pytest.raises(ValueError, match=message):
            LocalSampler(MODELS["qwen3"], MODELS["qwen3"].params, **{"known": 50, **settings})


@families
def test_numbers_that_are_none_fail_one_request_and_nothing_after_it(rng, family):
    model = MODELS[family]
    engine = sampler(family, slots=1)
    good = Request("good", tuple(range(10, 40)), 5, (), 0)
    engine.submit(good)
    want = engine.poll()[0]
    layers = model.params["layers"]
    engine.update({**model.params, "layers": jax.tree.map(lambda x: x * jnp.nan, layers)})
    engine.submit(Request("bad", prompt(rng, 40), 5, (), 0))
    (bad,) = engine.poll()
    assert (bad.reason, bad.tokens) == ("error", ())
    assert bad.error == "the model's logits are not numbers"
    engine.update(model.params)
    engine.submit(good)
    assert engine.poll() == [want]


def test_new_parameters_leave_nothing_of_the_old(rng):
    model = MODELS["qwen3"]
    other = init_model(model.config, 1).params
    engine = sampler("qwen3")
    request = Request("c", prompt(rng, 30), 6, (), 5)
    engine.submit(request)
    (old,) = engine.poll()
    engine.update(other)
    engine.submit(request)
    (new,) = engine.poll()
    assert old.tokens != new.tokens
    fresh = sampler("qwen3", other)
    fresh.submit(request)
    assert fresh.poll() == [new]


def test_time_runs_out_without_loss(rng):
    engine = sampler("qwen3")
    engine.submit(Request("c", prompt(rng, 30), 40, (), 0))
    polls = 0
    while not (done := engine.poll(timeout=0.0)):
        polls += 1
    assert len(done[0].tokens) == 40
    assert polls == 2 + 9  # 29 tokens in two chunks; ten bursts of 4, of which the last finishes


def test_what_is_forgotten_is_not_finished(rng):
    engine = sampler("qwen3", slots=1)
    for name in "ab":
        engine.submit(Request(name, prompt(rng, 5), 4, (), 0))
    engine.forget("a")
    assert set(finish(engine)) == {"b"}
    engine.submit(Request("c", prompt(rng, 5), 4, (), 0))
    engine.forget("c")
    engine.forget("nobody")
    assert engine.poll() == []
    engine.submit(Request("d", (KNOWN + 50,), 4, (), 0))  # refused, and the refusal forgotten
    engine.forget("d")
    engine.submit(Request("d", prompt(rng, 5), 4, (), 0))
    assert engine.poll()[0].reason == "length"
    engine.close()
    assert engine.poll() == []


@families
def test_a_fork_continues_from_its_origins_cache_at_any_token(rng, family):
    # Three slots for four conversations: the last fork copies from the host.
    made = sampler(family)
    first = Request("origin", prompt(rng, 37), 25, (STOP,), seed=1)
    made.submit(first)
    grown = first.prompt + finish(made)["origin"].tokens
    before = made.stats.prefilled
    cuts = [37, 38, len(grown) - 2]
    forks = {
        f"fork {n}": Request(
            f"fork {n}", grown[:cut] + prompt(rng, 5), 9, (STOP,), seed=n, origin="origin"
        )
        for n, cut in enumerate(cuts)
    }
    for request in forks.values():
        made.submit(request)
    found = finish(made)
    for name, request in forks.items():
        same(found[name], alone(family, request))
    forwarded = made.stats.prefilled - before
    if MODELS[family].recurrent:
        # Its state at the fork is gone, so the prompt is forwarded again.
        assert made.stats.forked == 0 and forwarded > sum(cuts)
    else:
        assert made.stats.forked == sum(cuts) and made.stats.parked
        # All that is new but for its last token, which goes with the drawing.
        assert forwarded == 4 * len(cuts)
    # The origin itself goes on from where it stood, forked from or not.
    again = Request("origin", grown + prompt(rng, 3), 5, (STOP,), seed=9)
    before = made.stats.prefilled
    made.submit(again)
    same(finish(made)["origin"], alone(family, again))
    assert made.stats.prefilled - before <= 3


def test_a_fork_of_a_forgotten_origin_forwards_its_prompt(rng):
    made = sampler("qwen3")
    request = Request("fork", prompt(rng, 20), 4, (STOP,), seed=3, origin="gone")
    made.submit(request)
    same(finish(made)["fork"], alone("qwen3", request))
    assert made.stats.forked == 0


@families
def test_conversations_that_find_no_room_on_the_host_are_forwarded_again(rng, family):
    made = sampler(family, host_bytes=0)
    requests = [Request(f"c{n}", prompt(rng, 20), 4, (), seed=n) for n in range(5)]
    grown = {}
    for request in requests:
        made.submit(request)
        grown[request.conversation] = request.prompt + finish(made)[request.conversation].tokens
    assert made.stats.dropped == made.stats.parked == 2
    again = Request("c0", grown["c0"] + prompt(rng, 3), 4, (), seed=9)
    before = made.stats.prefilled
    made.submit(again)
    same(finish(made)["c0"], alone(family, again))
    assert made.stats.prefilled - before == 26
