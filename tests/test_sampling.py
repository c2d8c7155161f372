import jax
import jax.numpy as jnp
import numpy as np
import pytest

from race_jax.sampling import Rule, draw, uniforms


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def rule(rows, temperature=1.0, top_p=1.0, top_k=0):
    return Rule(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
    )


def shares(logits, known=None, count=20_000, **settings):
    """How often each token comes, over evenly spaced chances."""
    logits = jnp.asarray(logits, jnp.float32)
    known = len(logits) if known is None else known
    chance = (jnp.arange(count) + 0.5) / count
    rows = jnp.broadcast_to(logits, (count, len(logits)))
    tokens, logprobs = jax.jit(draw, static_argnums=3)(rows, rule(count, **settings), chance, known)
    return np.bincount(tokens, minlength=len(logits)) / count, np.asarray(tokens), logprobs


def kept_by(probabilities, top_p=1.0, top_k=0):
    """Which tokens stay, by sorting; there are no ties."""
    order = np.argsort(-probabilities)
    if top_k:
        order = order[:top_k]
    mass = np.cumsum(probabilities[order]) / np.sum(probabilities[order])
    count = int(np.searchsorted(mass, top_p - 1e-9)) + 1 if top_p < 1 else len(order)
    kept = np.zeros(len(probabilities))
    kept[order[:count]] = probabilities[order[:count]]
    return kept / kept.sum()


def test_worked_by_hand():
    """Probabilities 1/2, 1/4, 1/4: chances 0.49, 0.51, 0.76 fall into the first, second, third."""
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]] * 3))
    tokens, logprobs = draw(logits, rule(3), jnp.array([0.49, 0.51, 0.76]), 3)
    assert tokens.tolist() == [0, 1, 2]
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.25, 0.25]), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("size", [3, 512, 513, 1500])
def test_tokens_come_as_often_as_they_are_probable(rng, size, temperature):
    logits = 2 * rng.standard_normal(size)
    want = np.exp(logits / temperature) / np.sum(np.exp(logits / temperature))
    got, tokens, logprobs = shares(logits, temperature=temperature)
    np.testing.assert_allclose(got, want, atol=2e-4)
    np.testing.assert_allclose(logprobs, np.log(want)[tokens], atol=1e-4)


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.9, 0), (0.3, 0), (1.0, 1), (1.0, 7), (0.8, 20), (1e-6, 0), (0.999, 999)]
)
def test_truncation_keeps_what_a_sort_keeps(rng, top_p, top_k):
    logits = 2 * rng.standard_normal(700)
    p = np.exp(logits) / np.sum(np.exp(logits))
    got, tokens, logprobs = shares(logits, top_p=top_p, top_k=top_k)
    want = kept_by(p, top_p, top_k)
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert not np.any(got[want == 0])
    # Of the full distribution, not of what is left.
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-4)


def test_ties_with_the_last_token_kept_are_kept():
    got, *_ = shares(np.array([0.0, 1.0, 0.0, -1.0]), top_k=2)
    assert np.all(got[[0, 1, 2]] > 0) and got[3] == 0


def test_rows_of_one_batch_keep_their_own_rules(rng):
    logits = jnp.asarray(rng.standard_normal((4, 600)), jnp.float32)
    rules = Rule(
        jnp.array([0.0, 0.7, 1.0, 1.0]), jnp.array([1, 1, 0.5, 1]), jnp.array([0, 0, 0, 3])
    )
    chance = jnp.array([0.99, 0.4, 0.7, 0.2])
    tokens, logprobs = draw(logits, rules, chance, 600)
    for row in range(4):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], rules)
        one = draw(logits[row : row + 1], alone, chance[row : row + 1], 600)
        assert one[0][0] == tokens[row]
        assert one[1][0] == logprobs[row]
    assert tokens[0] == np.argmax(logits[0])
    assert logprobs[0] == pytest.approx(float(jax.nn.log_softmax(logits[0])[tokens[0]]), abs=1e-5)


def test_temperature_is_on_both_sides():
    """Logits 2, 0 at temperature 0.5: log softmax(4, 0) = -log(1 + e^-4) = -0.0181, not -0.1269."""
    _, logprob = draw(jnp.array([[2.0, 0.0]]), rule(1, temperature=0.5), jnp.array([0.1]), 2)
    assert logprob[0] == pytest.approx(-np.log1p(np.exp(-4.0)), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lead", [1.0, 300.0])
def test_ids_that_the_tokenizer_lacks_are_never_drawn(rng, temperature, lead):
    """Ten known ids of sixteen, and row 12 of the head leads, however far."""
    logits = rng.standard_normal(16)
    logits[12] = np.max(logits) + lead
    got, tokens, logprobs = shares(logits, known=10, temperature=temperature)
    assert not np.any(got[10:])
    want = np.exp(logits[:10]) / np.sum(np.exp(logits[:10]))
    if temperature:
        np.testing.assert_allclose(got[:10], want, atol=2e-4)
    # The normaliser runs over all sixteen, as the trainer's does.
    full = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
    np.testing.assert_allclose(logprobs, full[tokens], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("chance", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_the_ends_of_the_range_draw_tokens_of_positive_weight(chance):
    logits = jnp.full((1, 1200), -jnp.inf).at[0, jnp.array([3, 700])].set(0.0)
    tokens, logprobs = draw(logits, rule(1), jnp.array([chance]), 1200)
    assert tokens[0] == (3 if chance == 0 else 700)
    assert logprobs[0] == pytest.approx(-np.log(2), abs=1e-6)


def test_numbers_follow_key_and_count_alone():
    keys = jnp.array([[0, 1], [0, 2], [0, 1]], jnp.uint32)
    counts = jnp.array([0, 0, 1])
    numbers = uniforms(keys, counts)
    assert len(set(numbers.tolist())) == 3
    np.testing.assert_array_equal(uniforms(keys[2:], counts[2:]), numbers[2:])
    many = uniforms(jnp.array([[0, 7]] * 4000, jnp.uint32), jnp.arange(4000))
    assert np.all((many >= 0) & (many < 1))
    # Standard error of the mean: sqrt(1 / 12 / 4000) = 0.0046.
    assert abs(float(jnp.mean(many)) - 0.5) < 4 * 0.0046
