import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from race_jax.models import ModelConfig, init_model
from race_jax.packing import ACTION, DECISION, OTHER, REASONING, fill_rows
from race_jax.train.evaluate import close_table, evaluate, make_evaluation, shown
from race_jax.train.optimizer import LoraConfig
from race_jax.train.state import Trainee
from race_jax.train.step import ComputeConfig

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
)
CLOSE = 20
# prompt 1 2 | THINK: 7 8 20 21, action 3 4 | observation 5 6 | SKIP: 20 21, action 9 4
TOKENS = [1, 2, 7, 8, 20, 21, 3, 4, 5, 6, 20, 21, 9, 4]
KIND = [
    *(OTHER, OTHER, DECISION, REASONING, REASONING, REASONING, ACTION, ACTION, OTHER, OTHER),
    *(DECISION, REASONING, ACTION, ACTION),
]


def example(tokens, kinds):
    return {"tokens": np.array(tokens, np.int32), "kinds": np.array(kinds, np.uint8)}


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, 0)


def run(model, batches):
    trainee = Trainee(model, {}, LoraConfig())
    evaluation = make_evaluation(trainee, ComputeConfig(dtype="float32", head_chunk=4), CLOSE)
    return evaluate(evaluation, model.params, {}, batches, lambda batch: batch)


def expected(model, tokens):
    ids = jnp.asarray([tokens])
    places = jnp.arange(len(tokens))[None]
    hidden = jax.jit(model.forward)(model.params, ids, places, jnp.ones_like(ids))[0]
    logits = np.asarray(hidden, np.float64) @ np.asarray(model.head(model.params), np.float64).T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_losses_by_kind_and_closing_rates_by_hand(model):
    found = run(model, [fill_rows([[example(TOKENS, KIND)]], 16)])
    logp = expected(model, TOKENS)

    def loss(kind):
        at = [t for t, k in enumerate(KIND) if k == kind]
        return -np.mean([logp[t - 1, TOKENS[t]] for t in at]), len(at)

    for name, kind in (("reasoning", REASONING), ("decision", DECISION), ("action", ACTION)):
        np.testing.assert_allclose(found[f"eval/loss_{name}"], loss(kind)[0], rtol=1e-5)
    total = sum(mean * count for mean, count in map(loss, (REASONING, DECISION, ACTION)))
    np.testing.assert_allclose(found["eval/loss"], total / 10, rtol=1e-5)
    # What is asked is the chance of </think> at each turn's first place, whatever stands there.
    np.testing.assert_allclose(found["eval/close_on_think"], np.exp(logp[1, CLOSE]), rtol=1e-5)
    np.testing.assert_allclose(found["eval/close_on_skip"], np.exp(logp[9, CLOSE]), rtol=1e-5)
    assert (found["eval/turns_skip"], found["eval/turns_think"]) == (1, 1)


def test_batches_weigh_by_their_tokens_and_packing_changes_nothing(model):
    one, two = example(TOKENS, KIND), example(TOKENS[:8], KIND[:8])
    together = run(model, [fill_rows([[one, two], []], 24)])
    apart = run(model, [fill_rows([[one], []], 16), fill_rows([[], [two]], 16)])
    assert together.keys() == apart.keys()
    for name, value in together.items():
        np.testing.assert_allclose(apart[name], value, rtol=1e-5, err_msg=name)
    assert together["eval/turns_think"] == 2


def test_kinds_that_do_not_occur_are_left_out(model):
    # Only a THINK turn: no rate on SKIP turns, rather than a rate of 0.
    found = run(model, [fill_rows([[example(TOKENS[:8], KIND[:8])]], 16)])
    assert "eval/close_on_skip" not in found
    assert found["eval/turns_skip"] == 0
    assert "closes on THINK turns" in shown(found)
    assert "SKIP" not in shown(found)
    assert run(model, [])["eval/turns_think"] == 0


def test_the_table_holds_both_rates_and_their_complements():
    console = Console(width=100)
    with console.capture() as text:
        console.print(
            close_table(
                {
                    "step 0": {"eval/close_on_think": 0.25, "eval/turns_think": 3},
                    "step 9": {
                        "eval/close_on_think": 0.1,
                        "eval/close_on_skip": 0.875,
                        "eval/turns_think": 3,
                        "eval/turns_skip": 8,
                    },
                }
            )
        )
    rows = [line for line in text.get().splitlines() if "SKIP" in line or "THINK" in line]
    skip, think = (line.replace("│", " ").split() for line in rows)
    assert skip == ["SKIP", "8", "-", "-", "87.5%", "12.5%"]
    assert think == ["THINK", "3", "25.0%", "75.0%", "10.0%", "90.0%"]
