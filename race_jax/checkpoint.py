"""Checkpoints of a training run: arrays by Orbax, and notes beside them.

A checkpoint is written in the background and takes its name when it is complete, so a run that is
killed at any moment, in the middle of a save too, finds the one before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from race_jax.settings import differing_settings

_STATE, _NOTES = "state", "notes"
_SHOWN = 5
_PACKED = 0.8
"""What is left of trained arrays at least when Orbax has compressed them."""
_LISTED = 8
"""Settings that a message names; more differ where the folder is another command's."""


class Checkpoints:
    """The checkpoints of one run, one folder per step; a context manager.

    Attributes:
        folder: Where they lie.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, read_only: bool = False):
        """Open the folder, or make it.

        Args:
            folder: A folder of its own, for one run.
            keep: Latest checkpoints to keep; the one with the lowest held-out loss stays as well.
            read_only: Write and remove nothing; the folder must be there.

        Raises:
            ValueError: `keep` is below 1, or the folder is a file.
            FileNotFoundError: It is not there and `read_only` is set.
        """
        self.folder = Path(folder).absolute()
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint.")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is a file; name a folder for checkpoints.")
        if read_only and not self.folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder of checkpoints.")
        logging.getLogger("absl").setLevel(logging.ERROR)
        logging.getLogger("absl").addFilter(_unheard)
        kept = [
            policy.LatestN(keep),
            policy.BestN(
                get_metric_fn=lambda metrics: metrics["loss"],
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(_STATE, _NOTES),
            item_handlers={
                _STATE: ocp.PyTreeCheckpointHandler(),
                _NOTES: ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy.AnyPreservationPolicy(kept),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
                save_root_metadata=False,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete checkpoint, in order."""
        return tuple(sorted(self._manager.all_steps()))

    @property
    def latest(self) -> int | None:
        """The last of `steps`."""
        return self.steps[-1] if self.steps else None

    @property
    def best(self) -> int | None:
        """The step with the lowest held-out loss among those that are kept; None if none has."""
        losses = {step: self.notes(step)["loss"] for step in self.steps}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        return min(known, key=lambda step: (known[step], -step)) if known else None

    def save(
        self, step: int, state: Any, notes: Mapping[str, Any], *, loss: float | None = None
    ) -> None:
        """Begin to write a checkpoint; it goes on in the background.

        The arrays are copied first, so a step may donate them at once. If the one before is still
        being written, this waits for it.

        Args:
            step: Number of steps done; a step that is there already is left as it is.
            state: Pytree of arrays.
            notes: What else belongs to it, ready for JSON: settings, data position.
            loss: Held-out loss, by which `best` chooses; None if it is not known.

        Raises:
            OSError: The one before could not be written, or the disk has no room for this one.
        """
        if step in self._manager.all_steps():
            return
        known = loss is not None and math.isfinite(loss)
        with self._explained():
            self._manager.wait_until_finished()
            self._check_room(state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state),
                    notes=ocp.args.JsonSave(
                        {**notes, "step": step, "loss": loss if known else None}
                    ),
                ),
                metrics={"loss": loss} if known else None,
            )

    def wait(self) -> None:
        """Wait until all is on disk.

        Raises:
            OSError: It could not be written; the checkpoints before are whole.
        """
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and release what the manager holds."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # A save that failed was told of above.
                self._manager.close()

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint.

        Raises:
            ValueError: There is no complete checkpoint of that step, or it has no notes.
        """
        self._check(step)
        args = ocp.args.Composite(notes=ocp.args.JsonRestore())
        try:
            return dict(self._manager.restore(step, args=args)[_NOTES])
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"{self.folder / str(step)} cannot be read ({error}). Remove that folder to go on "
                "from the checkpoint before."
            ) from error

    def restore(self, step: int, like: Any, *, partial: bool = False) -> Any:
        """Read a checkpoint's arrays onto the devices at hand, whatever they were saved from.

        Args:
            step: One of `steps`.
            like: Pytree of `jax.ShapeDtypeStruct` with the tree of the saved state; leaves with a
                sharding go there, others to the first device.
            partial: Whether `like` may lack parts of what was saved.

        Raises:
            ValueError: The checkpoint has other arrays than `like`; names them.
        """
        self._check(step)
        self._compare(step, like, partial)
        one = SingleDeviceSharding(jax.local_devices()[0])

        def told(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding if leaf.sharding is not None else one
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        wanted = jax.tree.map(told, like)
        args = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=partial,
        )
        read = self._manager.restore(step, args=ocp.args.Composite(state=args))[_STATE]
        # Orbax may hand back containers of its own kinds.
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(read))

    def _check_room(self, state: Any) -> None:
        """Refuse a save that cannot fit, before it leaves a part of itself."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if free < _PACKED * size:
            raise OSError(
                f"No space left: it takes {size / 2**20:,.1f} MiB, and {free / 2**20:,.1f} are free"
            )

    def _check(self, step: int) -> None:
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, self.steps)) or "none"
            raise ValueError(f"{self.folder} has no complete checkpoint {step}; there: {there}.")

    def _compare(self, step: int, like: Any, partial: bool) -> None:
        """Refuse arrays that are missing, superfluous or of another shape, by name."""
        saved = _shapes(self._manager.item_metadata(step)[_STATE].tree)
        wanted = _shapes(like)
        faults = [
            f"{name} is missing"
            if name not in saved
            else f"{name} has shape {saved[name]}, not {shape}"
            for name, shape in wanted.items()
            if saved.get(name) != shape
        ]
        if not partial:
            faults += [f"{name} is not expected" for name in saved if name not in wanted]
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise ValueError(
                f"{self.folder / str(step)} holds other arrays than this run has: "
                f"{'; '.join(faults[:_SHOWN])}{more}. Use the model and the optimizer that it was "
                "saved with, or another folder."
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what a failed write means for the run."""
        try:
            yield
        except Exception as error:
            last = self.latest
            kept = "there is no earlier one" if last is None else f"checkpoint {last} is whole"
            raise OSError(
                f"{self.folder}: a checkpoint could not be written ({error}); {kept}. Free space "
                "or mend the disk, and run the same command again to go on from there."
            ) from error


def _unheard(record: logging.LogRecord) -> bool:
    """Whether a record of the log is to be shown: none of Orbax, whose failures are raised too."""
    return "orbax" not in Path(record.pathname).parts


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every array of a tree, in the order of the tree."""

    def name(path: tuple) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".")

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {name(path): tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}


def check_settings(
    saved: Mapping[str, Any], given: Mapping[str, Any], where: str, *, free: Collection[str] = ()
) -> None:
    """Refuse to continue a run under other settings.

    Args:
        saved: The settings of the checkpoint, nested or flat.
        given: Those of this run.
        where: What holds the checkpoint, for the message.
        free: Fields, or groups of fields, that may differ.

    Raises:
        ValueError: Fields differ; the first ones are named with both values.
    """
    differing = differing_settings(saved, given, free=free)
    if differing:
        rest = len(differing) - _LISTED
        more = f"; and {rest} more" if rest > 0 else ""
        raise ValueError(
            f"{where} holds a run with other settings: {'; '.join(differing[:_LISTED])}{more}. "
            "Set them back to go on with it, or name another folder for a new run."
        )
