"""Hybrids against themselves: packed, padded, cut into cached pieces, rolled back, in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import stir

from race_jax.models import ModelConfig, init_model

TINY = ModelConfig(
    "qwen3_5_text",
    61,
    16,
    24,
    4,
    2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-2,  # or a norm would enlarge the rounding of what is read near 0
    tie_word_embeddings=True,
    layer_types=("linear_attention", "full_attention") * 2,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
)
SIZES = [1, 2, 3, 63, 64, 65]


def noisy(dtype="float32"):
    """A model whose every parameter counts, norms and biases included."""
    return stir(init_model(TINY, 0, dtype))


MODEL = noisy()
forward = jax.jit(lambda model, *rows: model.forward(*rows), static_argnums=0)
extend = jax.jit(lambda model, *arrays: model.extend(*arrays), static_argnums=0)


def whole(texts, model=MODEL):
    """Hidden states of each text alone, in rows padded on the right to six times 128."""
    tokens, positions, segments = np.zeros((3, 6, 128), np.int32)
    for row, text in enumerate(texts):
        size = len(text)
        tokens[row, :size], positions[row, :size], segments[row, :size] = text, np.arange(size), 1
    hidden = np.asarray(forward(model, model.params, tokens, positions, segments))
    return [hidden[row, : len(text)] for row, text in enumerate(texts)]


def draw(rng, *sizes):
    return [rng.integers(0, 61, size) for size in sizes]


def put(cache, tokens, slots, starts, counts):
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, slots, starts, counts))
    return extend(MODEL, MODEL.params, cache, *arrays)


def close(got, want):
    """Equal but for rounding."""
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.fixture(scope="module")
def texts():
    return draw(np.random.default_rng(7), *SIZES)


def test_packed_segments_equal_each_alone(texts):
    both = [texts, texts[::-1]]
    tokens = np.stack([np.concatenate(order) for order in both])
    positions = np.stack([np.concatenate([np.arange(len(t)) for t in order]) for order in both])
    segments = np.stack([np.repeat(np.arange(6) + 1, [len(t) for t in order]) for order in both])
    packed = np.asarray(forward(MODEL, MODEL.params, tokens, positions, segments))
    alone = whole(texts)
    close(packed[0], np.concatenate(alone))
    close(packed[1], np.concatenate(alone[::-1]))
    # States do matter: as one segment, all but the first token read something else.
    joined = forward(MODEL, MODEL.params, tokens, positions, np.ones_like(segments))
    moved = np.abs(np.asarray(joined)[0] - packed[0]).max(axis=-1)
    assert moved[0] < 1e-5 and moved[1:].min() > 1e-3


def test_padding_on_either_side_changes_nothing(rng):
    (text,) = draw(rng, 9)
    ones = np.ones((1, 9), np.int32)
    want = forward(MODEL, MODEL.params, text[None], np.arange(9)[None], ones)
    tokens, positions, segments = np.zeros((3, 6, 128), np.int32)
    tokens[:] = 999  # padding may hold any id, even one that the vocabulary lacks
    lefts = [0, 1, 60, 64, 119]
    for row, left in enumerate(lefts):
        at = np.s_[row, left : left + 9]
        tokens[at], positions[at], segments[at] = text, np.arange(9), 1
    got = np.asarray(forward(MODEL, MODEL.params, tokens, positions, segments))
    assert np.all(np.isfinite(got))
    for row, left in enumerate(lefts):
        close(got[row, left : left + 9], want[0])


def test_an_id_outside_the_vocabulary_gives_nan_in_its_row_alone(texts):
    spoilt = [*texts[:3], np.where(np.arange(63) == 40, 61, texts[3]), *texts[4:]]
    got = whole(spoilt)
    assert np.all(np.isnan(got[3][40:]))
    assert all(np.all(np.isfinite(x)) for row, x in enumerate(got) if row != 3)


@functools.partial(jax.jit, static_argnums=(0, 2))
def gradients(model, params, remat, tokens, positions, segments):
    """A loss of the tokens that are not padding, and its gradients."""

    def loss(params):
        states = model.forward(params, tokens, positions, segments, remat=remat)
        return jnp.sum(jnp.where(segments[..., None] > 0, jnp.sin(states), 0))

    return jax.value_and_grad(loss)(params)


def test_gradients_do_not_depend_on_padding_nor_on_recomputing(rng):
    """Two texts in one row of two, at its left end; and in the other row, with padding around."""
    first, second = draw(rng, 17, 3)
    parts = [np.concatenate([first, second]), np.r_[:17, :3], np.repeat([1, 2], [17, 3])]
    left, inside = (
        [np.stack([np.pad(x, (0, 13)), np.zeros(33, int)]) for x in parts],
        [np.stack([np.zeros(33, int), np.pad(x, (4, 9))]) for x in parts],
    )
    want_loss, want = gradients(MODEL, MODEL.params, False, *left)
    loss, got = gradients(MODEL, MODEL.params, True, *inside)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        size = np.linalg.norm(b)
        assert np.isfinite(size) and size > 1e-3, path
        assert np.linalg.norm(a - b) < 1e-4 * size, path


def test_bfloat16_is_near_float32(texts):
    half = noisy("bfloat16")
    want, got = np.concatenate(whole(texts)), np.concatenate(whole(texts, half))
    assert 1e-4 < np.sqrt(np.mean((got - want) ** 2)) < 0.05 * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize(
    ("size", "lengths"), [(1, [2, 5, 9]), (16, [1, 40, 99]), (48, [3, 99, 64])]
)
def test_any_schedule_of_rows_equals_one_pass(rng, size, lengths):
    """Several slots and rows of one slot in a call, short rows, slots used again, stale NaN."""
    rows, slots = 5, 3
    cache = MODEL.init_cache(MODEL.params, slots, 128 + size)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    for _ in range(2):
        texts = draw(rng, *lengths)
        wants, done = whole(texts), [0] * slots
        while any(done[s] < lengths[s] for s in range(slots)):
            plan = []
            for slot in rng.permutation(slots):
                for _ in range(int(rng.integers(0, rows - len(plan) + 1))):
                    if done[slot] == lengths[slot]:
                        break
                    count = min(size, lengths[slot] - done[slot])
                    stop = rng.random() < 0.3  # a row that ends early is the slot's last one
                    count = int(rng.integers(1, count + 1)) if stop else count
                    plan.append((slot, done[slot], count))
                    done[slot] += count
                    if stop:
                        break
            plan += [(slots, 0, 0)] * (rows - len(plan))
            tokens = rng.integers(0, 61, (rows, size))
            for row, (slot, start, count) in enumerate(plan):
                if slot < slots:
                    tokens[row, :count] = texts[slot][start : start + count]
            hidden, cache = put(cache, tokens, *zip(*plan, strict=True))
            for row, (slot, start, count) in enumerate(plan):
                if slot < slots:
                    close(hidden[row, :count], wants[slot][start : start + count])
        lengths = lengths[::-1]


def test_states_are_rolled_back_exactly_and_copied_to_other_slots(rng):
    text, tried, more = draw(rng, 20, 16, 16)
    (want,) = whole([np.concatenate([text, more])])
    cache = MODEL.init_cache(MODEL.params, 3, 48)
    tokens = np.zeros((5, 16), np.int32)
    tokens[:2] = np.pad(text, (0, 12)).reshape(2, 16)
    _, cache = put(cache, tokens, [0, 0, 3, 3, 3], [0, 16, 0, 0, 0], [16, 4, 0, 0, 0])
    before = jax.tree.map(np.asarray, cache)
    zero, two, at = (jnp.array([i]) for i in (0, 2, 20))
    states, rows = MODEL.read_states(cache, zero), MODEL.read_rows(cache, zero, at, 16)
    tokens[0] = tried
    _, cache = put(cache, tokens, [0, 3, 3, 3, 3], [20, 0, 0, 0, 0], [16, 0, 0, 0, 0])
    assert np.abs(cache.states.state[:, 0] - before.states.state[:, 0]).max() > 1e-3
    cache = MODEL.write_states(MODEL.write_rows(cache, rows, zero, at), states, zero)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a[:, :3], b[:, :3])
    # Into another slot, with what was written of the text; both go on alike.
    cache = MODEL.write_rows(cache, MODEL.read_rows(cache, zero, 0 * at, 20), two, 0 * at)
    cache = MODEL.write_states(cache, states, two)
    tokens[:2] = more
    hidden, _ = put(cache, tokens, [0, 2, 3, 3, 3], [20, 20, 0, 0, 0], [16, 16, 0, 0, 0])
    close(hidden[0], want[20:])
    close(hidden[1], want[20:])
