"""One of several processes: scores a batch, takes an optimizer step, works off ragged batches.

Arguments: process id, number of processes, coordinator, mesh sizes as JSON, folder for the result.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from race_jax.logprobs import token_logprobs
from race_jax.models import ModelConfig, abstract_params, init_model, param_axes
from race_jax.sharding import make_mesh, place, shardings_for, state_shardings, use_mesh
from race_jax.train.distributed import DistributedConfig, fetch, in_step, row_share, start, to_mesh

CONFIG = ModelConfig("qwen3", 64, 32, 48, 2, 4, num_key_value_heads=2, head_dim=8)
FIELDS = {"tokens": np.int32, "positions": np.int32, "segment_ids": np.int32, "weights": np.float32}


def batch(seed, rows=8, length=32):
    rng = np.random.default_rng(seed)
    segments = np.where(np.arange(length) < rng.integers(8, length, (rows, 1)), 1, 0)
    return {
        "tokens": rng.integers(0, 64, (rows, length)).astype(np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "segment_ids": segments.astype(np.int32),
        "weights": (segments * rng.random((rows, length))).astype(np.float32),
    }


def loss(model, params, data):
    """Sum and weight, and the log-probabilities."""
    hidden = model.forward(params, data["tokens"], data["positions"], data["segment_ids"])
    logprobs = token_logprobs(hidden, model.head(params), jnp.roll(data["tokens"], -1, axis=1))
    weights = data["weights"]
    total = jnp.sum(jnp.where(weights > 0, -logprobs * weights, 0))
    return total, (jnp.sum(weights), logprobs)


def main(index, count, coordinator, sizes, folder):
    processes = {} if count == 1 else {
        "coordinator": coordinator, "processes": count, "process_id": index
    }  # fmt: skip
    start(DistributedConfig(**processes, timeout=60))
    assert jax.process_count() == count and jax.device_count() == 8
    mesh = make_mesh(**sizes)
    share, shares = row_share(mesh)
    model = init_model(CONFIG, 0)
    shapes = abstract_params(CONFIG)
    where = shardings_for(param_axes(CONFIG), mesh, shapes)
    params = place(model.params, where)
    rule = optax.adam(1e-2)
    state_where = state_shardings(jax.eval_shape(rule.init, shapes), shapes, where)
    gradient = jax.value_and_grad(functools.partial(loss, model), has_aux=True)

    @functools.partial(jax.jit, out_shardings=(where, None, None))
    def step(params, state, data):
        (total, (weight, logprobs)), grads = gradient(params, data)
        grads = jax.tree.map(lambda g: g / weight, grads)
        return optax.apply_updates(params, rule.update(grads, state, params)[0]), total, logprobs

    with use_mesh(mesh):
        state = jax.jit(rule.init, out_shardings=state_where)(params)
        whole = batch(0)
        mine = {k: np.split(v, shares)[share] for k, v in whole.items()}
        stepped, total, logprobs = step(params, state, to_mesh(mine, mesh))
        # The first share has three batches and the other one, of another length.
        work = [batch(i, 4, 32) for i in (1, 2, 3)] if share == 0 else [batch(4, 4, 16)]
        if shares == 1:
            work = [batch(1, 4, 32), batch(2, 4, 32), batch(3, 4, 32), batch(4, 4, 16)]
        sums, rounds = np.zeros(2), 0
        score = jax.jit(lambda params, data: loss(model, params, data))
        for data in in_step(work, mesh, FIELDS):
            one, (weight, _) = score(stepped, data)
            sums += [float(one), float(weight)]
            rounds += 1
        result = {
            "total": float(total),
            "logprobs": fetch(logprobs),
            "embed": fetch(stepped["embed"]),
            "key": fetch(stepped["layers"]["attention"]["key"]),
            "sums": sums,
            "rounds": rounds,
        }
    np.savez(Path(folder) / f"{count}-{index}.npz", **result)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])
