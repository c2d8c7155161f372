"""The same training on 1, 2 and 8 devices, and checkpoints that move between them."""

import jax
import numpy as np

from race_jax import losses
from race_jax.checkpoint import Checkpoints
from race_jax.models import ModelConfig, init_model
from race_jax.sharding import make_mesh, sharding_for, use_mesh
from race_jax.train.optimizer import LoraConfig, OptimizerConfig, make_optimizer, matrices
from race_jax.train.state import Trainee, abstract_state, init_state
from race_jax.train.step import ComputeConfig, make_step

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
)
ROWS, WIDTH = 8, 16
EIGHT = "eight, data 2 fsdp 2 tensor 2"
MESHES = {
    "one": (dict(data=1, fsdp=1), 1, 1),
    "one, 4 micro-batches": (dict(data=1, fsdp=1), 1, 4),
    "two, fsdp": (dict(fsdp=2), 2, 2),
    EIGHT: (dict(data=2, fsdp=2, tensor=2), 8, 2),
}


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, WIDTH + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1)),
        "segment_ids": np.ones((ROWS, WIDTH), np.int32),
        # Uneven, and nothing at all in some rows: a mean of means would not be the same.
        "loss_mask": rng.random((ROWS, WIDTH)) < np.linspace(0, 0.9, ROWS)[:, None],
    }


def loss(logprobs, data):
    return losses.sft(logprobs, data["loss_mask"])


def prepared(name):
    sizes, count, parts = MESHES[name]
    mesh = make_mesh(**sizes, devices=jax.devices()[:count])
    trainee = Trainee(init_model(CONFIG, 0), {}, LoraConfig())
    config = OptimizerConfig(lr=0.01, schedule="constant", warmup=0.0)
    rule = make_optimizer(config, 9, matrices(trainee.axes))
    compute = ComputeConfig(dtype="float32", micro_batches=parts, head_chunk=8)
    like = abstract_state(trainee, rule, mesh)
    return mesh, trainee, rule, like, make_step(trainee, rule, loss, compute)


def advance(state, mesh, step, times):
    where = sharding_for(("batch", "time"), mesh)
    placed = {k: jax.device_put(v, where) for k, v in batch().items()}
    numbers = {}
    for _ in range(times):
        state, numbers = step(state, {}, placed, WIDTH)
    return state, {k: float(v) for k, v in numbers.items()}


def train(name):
    mesh, trainee, rule, like, step = prepared(name)
    with use_mesh(mesh):
        where = jax.tree.map(lambda leaf: leaf.sharding, like)
        make = jax.jit(lambda p, k: init_state(trainee, rule, p, k), out_shardings=where)
        state = make(trainee.model.params, jax.random.key(0))
        state, numbers = advance(state, mesh, step, 2)
    return state, numbers


def compare(name, got, expected, atol):
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=atol, rtol=1e-4, err_msg=name)


def test_the_update_is_the_same_and_a_checkpoint_can_be_read_on_any_number(tmp_path):
    host, told = {}, {}
    for name in MESHES:
        state, told[name] = train(name)
        host[name] = jax.tree.map(np.asarray, state)
        # The gradient is seen through Adam's first moment: linear in it, before any division.
        compare(name, host[name].optimizer, host["one"].optimizer, 1e-5)
        compare(name, told[name], told["one"], 1e-4)
        if name == EIGHT:
            with Checkpoints(tmp_path / "c") as made:
                made.save(2, state, {})
    for name in ("one", "two, fsdp"):
        mesh, _, _, like, _ = prepared(name)
        with Checkpoints(tmp_path / "c") as found, use_mesh(mesh):
            state = found.restore(2, like)
        jax.tree.map(np.testing.assert_array_equal, state, host[EIGHT])
        assert state.trained["embed"].sharding == like.trained["embed"].sharding
        assert len(state.trained["embed"].sharding.device_set) == MESHES[name][1]
