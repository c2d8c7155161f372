"""What `rl_step.py` measures on, and the peers that it measures against."""

from __future__ import annotations

import functools

import numpy as np
from updates import SHAPE, peak_mib, time_updates

PROMPT, REASONING, ACTION, OBSERVATION = 128, 64, 24, 48
CLOSE, BLANK, END = 1, 2, 3


def episodes(args) -> list:
    """Trajectories of one length, half of them of advantage 1, with half of their turns removed."""
    from race_jax.rl_data import Judged
    from race_jax.types import TokenTrajectory, TokenTurn

    rng = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(10, args.vocab, count).tolist())

    items = []
    for n in range(args.trajectories):
        turns = []
        for t in range(args.turns):
            seen = ids(OBSERVATION) if t + 1 < args.turns else ()
            reasoning = (*ids(REASONING - 2), CLOSE, BLANK)
            turns.append(TokenTurn(reasoning, (CLOSE, BLANK), (*ids(ACTION - 1), END), seen))
        old = rng.normal(-12, 0.3, args.turns * (REASONING + ACTION)).tolist()
        solved = n % 2 == 0
        removed = tuple(range(1, args.turns, 2)) if solved and args.cover else ()
        tokens = TokenTrajectory(str(n), ids(PROMPT), tuple(turns))
        items.append(Judged(tokens, tuple(old), 1.0 if solved else -1.0, removed))
    return items


def length_of(args) -> int:
    """Tokens of an episode."""
    return PROMPT + args.turns * (REASONING + ACTION + OBSERVATION) - OBSERVATION


def run_trl(args) -> dict[str, float]:
    """TRL's loss on the same tokens, `args.rows` of them at a time."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    before = peak_mib()
    network = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    # The trainer wants a tokenizer; nothing is encoded or decoded here.
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": END}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="a"
    )
    config = GRPOConfig(
        output_dir=f"{args.folder}/trl",
        loss_type="bnpo",
        beta=0.0,
        epsilon=0.2,
        num_generations=args.trajectories,
        per_device_train_batch_size=args.trajectories,
        gradient_checkpointing=True,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    network = trainer.model
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.train()
    rule = torch.optim.AdamW(network.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    parts = trl_inputs(episodes(args), args.rows)
    total = sum(int(part["tool_mask"].sum()) for part in parts)

    def update_all() -> float:
        value = 0.0
        for part in parts:
            # Its token-mean is over what it is given, so parts are weighed by their tokens.
            share = int(part["tool_mask"].sum()) / total
            loss = trainer.compute_loss(network, part) * share
            loss.backward()
            value += loss.item()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        rule.step()
        rule.zero_grad()
        return value

    return {**time_updates(args.times, update_all), "mib": peak_mib() - before}


def trl_inputs(items: list, rows: int) -> list[dict]:
    """The episodes as TRL has them: prompt and completion, observations masked."""
    import torch

    from race_jax.rl_data import policy_example

    parts = []
    for at in range(0, len(items), rows):
        group = items[at : at + rows]
        laid = [policy_example(item, 0) for item in group]
        tokens = torch.from_numpy(np.stack([x["tokens"] for x in laid])).long()
        ones = torch.ones_like(tokens)
        old = torch.from_numpy(np.stack([x["old_logprobs"] for x in laid]))
        policy = torch.from_numpy(np.stack([x["completion"] for x in laid])).long()
        parts.append(
            {
                "prompt_ids": tokens[:, :PROMPT],
                "prompt_mask": ones[:, :PROMPT],
                "completion_ids": tokens[:, PROMPT:],
                "completion_mask": ones[:, PROMPT:],
                "tool_mask": policy[:, PROMPT:],
                "old_per_token_logps": old[:, PROMPT:],
                "advantages": torch.tensor([item.advantage for item in group]),
            }
        )
    return parts


def run_tunix(args) -> dict[str, float]:
    """Tunix's loss on the same tokens, `args.rows` of them at a time."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as loader
    from tunix.rl.algo_core import grpo_loss_fn
    from tunix.rl.common import TrainExample
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    before = peak_mib()
    shape = qwen3.ModelConfig(
        num_layers=args.layers,
        vocab_size=args.vocab,
        embed_dim=SHAPE["hidden_size"],
        hidden_dim=SHAPE["intermediate_size"],
        num_heads=SHAPE["num_attention_heads"],
        head_dim=SHAPE["head_dim"],
        num_kv_heads=SHAPE["num_key_value_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=qwen3.RematConfig.BLOCK,
    )
    network = loader.create_model_from_safe_tensors(args.folder, shape, dtype=jnp.float32)
    definition, params = nnx.split(network)
    del network
    config = GRPOConfig(loss_agg_mode="token-mean", beta=0.0, epsilon=0.2)
    config.temperature = 1.0  # its learner sets it
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b1=0.9, b2=0.95, weight_decay=0.0)
    )
    optimizer = rule.init(params)

    @jax.jit
    def gradient(params, part, share):
        def loss(params):
            network = nnx.merge(definition, params)
            return share * grpo_loss_fn(network, part, config, pad_id=-1, eos_id=END)[0]

        return jax.value_and_grad(loss)(params)

    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, optimizer, total):
        updates, optimizer = rule.update(total, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    parts = []
    for part in trl_inputs(episodes(args), args.rows):
        of = {name: jnp.asarray(value.numpy()) for name, value in part.items()}
        parts.append(
            TrainExample(
                prompt_ids=of["prompt_ids"],
                prompt_mask=of["prompt_mask"],
                completion_ids=of["completion_ids"],
                completion_mask=of["tool_mask"],
                advantages=of["advantages"],
                ref_per_token_logps=None,
                old_per_token_logps=of["old_per_token_logps"],
            )
        )
    tokens = sum(int(part.completion_mask.sum()) for part in parts)

    def update_all() -> float:
        nonlocal params, optimizer
        value, total = 0.0, None
        for part in parts:
            loss, found = gradient(params, part, int(part.completion_mask.sum()) / tokens)
            total = found if total is None else add(total, found)
            value += float(loss)
        params, optimizer = update(params, optimizer, total)
        jax.block_until_ready(params)
        return value

    return {**time_updates(args.times, update_all), "mib": peak_mib() - before}
