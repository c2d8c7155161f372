"""LoGiC: which turns of a finished trajectory need their reasoning."""

from race_jax.logic.cover import Cover, Removal, find_cover
from race_jax.logic.engine import Engine, Failure
from race_jax.logic.lanes import Lanes
from race_jax.logic.scoring import Scorer

__all__ = ["Cover", "Engine", "Failure", "Lanes", "Removal", "Scorer", "find_cover"]
