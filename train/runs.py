"""What runs of every kind share: where their arrays lie, and how they begin or go on."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from race_jax import jsonl
from race_jax.checkpoint import Checkpoints, check_settings
from race_jax.models import load_model
from race_jax.sharding import make_mesh, sharding_for
from race_jax.train.distributed import MeshConfig, to_mesh
from race_jax.train.state import Trainee, TrainState, abstract_state, fresh_state
from race_jax.train.step import Arrays, ComputeConfig
from race_jax.types import Params


class TrainingRun:
    """A run's folder, mesh and weights.

    Attributes:
        folder: Where it writes.
        mesh: Over all devices.
        rules: How arrays lie on it.
        trainee: What is trained; set by the kind of run.
        rule: The optimizer; set by the kind of run.
        settings: All that decides the run, ready for JSON; set by the kind of run.
        frozen: Weights under the adapters, from `begin` on; {} without adapters.
    """

    trainee: Trainee
    rule: optax.GradientTransformation
    settings: dict[str, Any]

    def __init__(self, model: str, out: str, mesh: MeshConfig, compute: ComputeConfig, seed: int):
        """Lay out the mesh.

        Args:
            model: Hugging Face directory to start from.
            out: The run's folder.
            mesh: Devices along each axis.
            compute: Its `dtype` is that of frozen weights.
            seed: Decides the adapters' start.

        Raises:
            ValueError: The mesh does not take all devices.
        """
        self.folder = Path(out)
        self.mesh, self.rules = make_mesh(**mesh.sizes()), mesh.rules()
        self.frozen: Params = {}
        self._model, self._dtype, self._seed = model, compute.dtype, seed

    def place(self, batch: Mapping[str, np.ndarray]) -> Arrays:
        """This process's rows of a batch as arrays over the mesh."""
        return to_mesh(batch, self.mesh)

    def begin(
        self, checkpoints: Checkpoints, free: Collection[str]
    ) -> tuple[TrainState, dict[str, Any]]:
        """The last checkpoint's state and notes; or a fresh state, and {}.

        Args:
            checkpoints: The run's.
            free: Settings that may differ from the checkpoint's.

        Raises:
            ValueError: The checkpoint is of a run with other settings.
        """
        like = abstract_state(self.trainee, self.rule, self.mesh)
        last = checkpoints.latest
        notes = {} if last is None else checkpoints.notes(last)
        if last is not None:
            saved, name = notes["settings"], "model_fingerprint"
            if saved.get(name) != self.settings.get(name):
                # The same weights may move; of others, people know the folder.
                free = [field for field in free if field != "model"]
            check_settings(saved, self.settings, str(checkpoints.folder), free=free)
        if jax.process_index() == 0:
            with jsonl.replacing(self.folder / "settings.json") as file:
                file.write(json.dumps(self.settings, indent=1).encode())
        if self.trainee.lora.rank:
            self.frozen = self._load(self._dtype)
        if last is not None:
            return checkpoints.restore(last, like), notes
        params = self.frozen or self._load("float32")
        return fresh_state(self.trainee, self.rule, like, params, self._seed), notes

    def _load(self, dtype: str) -> Params:
        def where(axes: tuple[str, ...]) -> jax.sharding.Sharding:
            return sharding_for(axes, self.mesh)

        return load_model(self._model, dtype, shardings=where).params
