import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from race_jax.models import ModelConfig
from race_jax.train import cli
from race_jax.train.costs import Costs, Traffic
from race_jax.train.distributed import MeshConfig
from race_jax.train.flops import ModelFlops
from race_jax.train.plan import Memory, Report, advise, needed_bytes, plan, split_memory
from race_jax.train.plan_cli import COLUMNS, markdown, verdict
from race_jax.train.plan_config import PlanConfig, model_config, read_config
from race_jax.train.step import ComputeConfig
from race_jax.train.topology import GIB, describe

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Query and output 32 * 4 * 16 each, key and value 32 * 2 * 16 each, three matrices 32 * 48.
MATRICES = 2 * 2048 + 2 * 1024 + 3 * 1536


@pytest.fixture(scope="module")
def eight():
    script = Path(__file__).with_name("plan_on_eight.py")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, script], env=env, check=True, capture_output=True)
    return json.loads(out.stdout)


def test_collectives_are_counted_with_their_bytes(eight):
    # [4, 8] float32 on each of 8 devices is 128 bytes; a gather makes, and a scatter takes, 1024.
    assert eight["collectives"] == {
        "all-reduce": [3, 3 * 128],
        "all-gather": [3, 3 * 1024],
        "reduce-scatter": [3, 3 * 1024],
        "collective-permute": [3, 3 * 128],
        "all-to-all": [3, 3 * 128],
    }


def test_memory_of_a_training_step(eight):
    report = eight["reports"]["SFT step"]
    assert report["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1, "context": 2}
    # fsdp and context cut what has an embedding axis into 8; the norms of 16 entries stay whole.
    entries = 3 * ((MATRICES + 2 * 32) // 8 + 2 * 16) + (2 * 64 * 32 + 32) // 8
    assert report["memory"]["parameters"] == 4 * entries
    # Two moments, and the counters of Adam and of its schedule.
    assert report["memory"]["optimizer"] == 2 * 4 * entries + 8
    # The input of 3 layers: 4 rows of a micro-batch over fsdp 4, 64 tokens over context 2.
    assert report["memory"]["activations"] == 3 * 1 * 32 * 32 * 4
    assert report["memory"]["temporaries"] > 4 * entries  # the gradient, at least
    kinds = report["costs"]["collectives"]
    assert {"all-gather", "collective-permute"} <= set(kinds)


def test_flops_of_a_training_step(eight):
    report = eight["reports"]["SFT step"]
    # The head sees an eighth of the row, which is what 10 % are rounded up to.
    row = 64 * 2 * 3 * MATRICES + 64 * 65 / 2 * 4 * 3 * 4 * 16 + 8 * 2 * 64 * 32
    assert report["model_flops"] == 3 * 8 * row
    # One more forward pass for what is recomputed, half of it attention that is masked.
    assert 1.2 < report["costs"]["flops"] * 8 / report["model_flops"] < 2


def test_what_scoring_holds(eight):
    scoring, engine = (eight["reports"][name] for name in ("scoring pass", "LoGiC engine step"))
    assert scoring["memory"]["cache"] == scoring["memory"]["optimizer"] == 0
    # 8 sequences over fsdp 4, and a spare slot for each piece; 2 heads over tensor 2; 64 + 16
    # tokens; keys and values in bfloat16.
    assert engine["memory"]["cache"] == 3 * (2 + 1) * 1 * 80 * 16 * 2 * 2
    # The head in float32 beside the weights: 64 rows over tensor 2, 32 columns over fsdp 4.
    head = engine["memory"]["parameters"] - scoring["memory"]["parameters"]
    assert head == 4 * 32 * 8


def test_meshes_that_do_not_fit(eight):
    faults = eight["faults"]
    assert "3, and the number of devices is 8; set fsdp 8" in faults["product"]
    assert "kv_heads is 2 and does not divide over tensor = 8; make tensor 2" in faults["heads"]
    assert "rl batch: batch is 4" in faults["rows"] and "or batch 8" in faults["rows"]
    assert "only one may be" in faults["axes"]


@pytest.mark.parametrize("program", ["rl", "decode"])
def test_one_device(program):
    config = PlanConfig(MODEL, program, sequence_length=32, rows=2)
    (report,) = plan(config, describe("cpu:1"))
    assert report.memory.limit is None and report.memory.fits and not report.advice
    assert report.costs is not None and report.mesh == dict.fromkeys(report.mesh, 1)
    dtype = 4 if program == "rl" else 2
    entries = 3 * (MATRICES + 2 * 32 + 2 * 16) + 2 * 64 * 32 + 32
    assert report.memory.parameters == dtype * entries
    assert report.memory.optimizer == (2 * 4 * entries + 8 if program == "rl" else 0)


def test_model_flops_of_experts():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = ModelConfig.from_hf({**MODEL, "model_type": "qwen3_moe", **sizes})
    # Each token passes the router and 2 of 8 experts of three matrices 32 * 24.
    layer = 2 * 2048 + 2 * 1024 + 32 * 8 + 2 * 3 * 32 * 24
    assert ModelFlops(shape).token == 2 * 3 * layer


def test_model_flops_of_a_hybrid():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}
    flops = ModelFlops(ModelConfig.from_hf({**MODEL, "model_type": "qwen3_5_text", **sizes}))
    mlp = 3 * 1536
    # Query and key 32 * 2 * 8 each; value, gate and output 32 * 4 * 8 each; two rates 32 * 4; four
    # taps for the 16 + 16 + 32 channels of the convolution.
    linear = 2 * 512 + 3 * 1024 + 2 * 128 + 4 * 64 + mlp
    # Attention's query has a gate beside it.
    full = 2 * 2048 + 2 * 1024 + 2048 + mlp
    # Three layers have 4 states of 8 x 8, each read twice and written once.
    assert flops.token == 2 * (3 * linear + full) + 3 * 6 * 4 * 64
    assert flops.pair == 4 * 4 * 16


def test_flops_of_a_step_by_step_pass_are_those_of_a_whole_one():
    flops = ModelFlops(ModelConfig.from_hf(MODEL))
    steps = sum(flops.extend(2, 3, before, 2 * 3) for before in range(0, 12, 3))
    assert steps == flops.forward(2, 12, 12)


def test_what_the_compiler_says_of_programs_that_do_not_fit():
    new = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    new += "temporaries (512.00G) exceeds available HBM (15.75G)."
    assert needed_bytes(new) == 512 * GIB
    old = "Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm capacity"
    assert needed_bytes(old) == int(17.5 * GIB)
    assert needed_bytes("INTERNAL: something else") is None


def test_memory_is_split_without_loss():
    stats = SimpleNamespace(
        argument_size_in_bytes=130,
        output_size_in_bytes=50,
        alias_size_in_bytes=40,
        temp_size_in_bytes=200,
        generated_code_size_in_bytes=7,
    )
    known = {"parameters": 60, "optimizer": 40, "inputs": 10}
    found = split_memory(known, stats, Costs(stacked=80), None, 1000)
    # 20 bytes of arguments are padding; 10 of output are new.
    assert found == Memory(60, 40, 0, 30, 80, 210 - 80, 7, 1000)
    assert found.total == 130 + 10 + 200 + 7 and found.fits
    stopped = split_memory(known, None, None, 1500, 1000)
    assert (stopped.total, stopped.temporaries, stopped.fits) == (1500, 1390, False)


def sample(**sizes):
    parts = ("parameters", "optimizer", "cache", "inputs", "activations", "temporaries", "code")
    memory = Memory(**{name: sizes.get(name, 0) * GIB for name in parts}, limit=16 * GIB)
    mesh = {"data": 1, "fsdp": 4, "tensor": 1, "context": 2}
    costs = Costs(2e12, {"all-gather": Traffic(3, 5 * GIB)})
    return Report("SFT step", "16 x 64 tokens", "v5e:2x4", 8, mesh, memory, 1e13, costs, 12.0)


def test_the_first_thing_to_change():
    config = PlanConfig(MODEL, "sft", rows=16, compute=ComputeConfig(micro_batches=2))
    assert advise(sample(parameters=5), config) == ""
    state = advise(sample(parameters=5, optimizer=10, temporaries=3), config)
    assert "take 15.0 GiB of each chip" in state and "fsdp above 4" in state and "lora" in state
    busy = sample(parameters=2, optimizer=4, activations=9, temporaries=9)
    assert "micro_batches 4" in advise(busy, config)
    least = PlanConfig(MODEL, "sft", rows=16, compute=ComputeConfig(micro_batches=4))
    assert "mesh.context 4 and mesh.fsdp 2, or sequence_length 32768" in advise(busy, least)
    one = dataclasses.replace(busy, mesh={**busy.mesh, "fsdp": 1, "context": 8})
    single = PlanConfig(MODEL, "sft", rows=16, compute=ComputeConfig(micro_batches=16))
    assert "16 chips with mesh.context 16, or" in advise(one, single)
    kept = PlanConfig(MODEL, "sft", compute=ComputeConfig(remat="none"))
    assert advise(busy, kept).startswith("compute.remat: block")
    decode = PlanConfig(MODEL, "decode", rows=64)
    assert advise(sample(parameters=4, cache=13), decode) == "fewer sequences at a time: rows 32"


def test_a_row_has_all_columns():
    config = PlanConfig(MODEL, "sft", rows=16)
    row = markdown(sample(parameters=5, activations=2), config, "race-jax plan ...")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == len(COLUMNS)
    found = dict(zip(COLUMNS, cells, strict=True))
    assert found["of chip"] == "7.00 / 16.00" and found["fits"] == "yes"
    assert found["FLOPs: compiled / model"] == "1.60"
    assert found["collectives"] == "all-gather 5.00"
    assert found["compiled"] == "qwen3 in bfloat16: 16 x 64 tokens"
    assert verdict(sample(parameters=5)) == "fits, 11.00 GiB of each chip are left"
    assert "needs 20.00 GiB of 16.00 GiB per chip" in verdict(sample(parameters=20))


def test_settings_are_read_and_checked(tmp_path):
    path = tmp_path / "run.yaml"

    def read(**changes):
        settings = {"model": MODEL, "program": "sft", "mesh": {"context": 4}, **changes}
        path.write_text(yaml.safe_dump(settings))
        return read_config(str(path))

    found = read(compute={"remat": "none"})
    assert found.mesh == MeshConfig(context=4) and found.compute == ComputeConfig(remat="none")
    for changes, words in (
        ({"row": 3}, "row"),
        ({"program": "train"}, "program"),
        ({"rows": 0}, "rows is 0; it must be at least 1"),
        ({"head_share": 1.5}, "above 0, at most 1"),
        ({"compute": {"dtype": "int8"}}, "dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            read(**changes)


def test_a_supervised_run_is_planned_from_its_own_file(tmp_path):
    path = tmp_path / "sft.yaml"
    run = {
        "model": "some/checkpoint",
        "out": "runs/one",
        "steps": 5,
        "data": {"path": "x.jsonl", "length": 4096, "batch_size": 6, "reasoning": "full"},
        "mesh": {"tensor": 2},
        "compute": {"micro_batches": 3},
    }
    path.write_text(yaml.safe_dump(run))
    found = read_config(str(path), "config.json")
    assert (found.program, found.sequence_length, found.rows) == ("sft", 4096, 6)
    assert (found.mesh.tensor, found.compute.micro_batches) == (2, 3)
    assert found.model == "config.json" and read_config(str(path)).model == "some/checkpoint"


def test_files_that_hold_no_settings(tmp_path):
    path = tmp_path / "run.yaml"
    for text, words in (("- 1", "holds no settings"), ("a: [", "is not YAML")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(str(path))


def test_models_by_file_folder_or_fields(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    shapes = [model_config(x) for x in (MODEL, str(tmp_path), str(tmp_path / "config.json"))]
    assert shapes[0] == shapes[1] == shapes[2]
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        model_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"gone is not here; name a config.json, such as --model"):
        model_config(str(tmp_path / "gone"))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/plan_*.yaml")), ids=lambda p: p.stem)
def test_the_plans_that_are_shipped(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert model_config(read_config(str(path)).model).hidden_size >= 2048


def test_faults_of_the_call(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "program": "decode"}))
    for name, words in (("v7:2x2", "the known ones are v5e, v5p, v6e"), ("v5e:5x5", "no slice")):
        assert cli.main(["plan", "--config", str(path), "--topology", name]) == 2
        assert words in capsys.readouterr().err
    missing = str(tmp_path / "none.yaml")
    assert cli.main(["plan", "--config", missing, "--topology", "v5e:2x2"]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err


def test_a_plan_for_a_tpu(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler comes with jax[tpu], which is not installed")
    path = tmp_path / "run.yaml"
    settings = {"model": MODEL, "program": "decode", "sequence_length": 256, "rows": 8}
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "race_jax.train.cli", "plan", "--config", str(path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [*command, "--topology", "v5e:2x2"], env=env, check=True, capture_output=True, text=True
    )
    assert "decode step on v5e:2x2: 4 chips, fsdp 4" in out.stdout
    assert "of 15.75" in out.stdout and "fits, " in out.stdout
