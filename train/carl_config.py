"""Settings of a run of CARL."""

from __future__ import annotations

import dataclasses
from typing import Literal

from race_jax.carl.advantages import Baseline
from race_jax.carl.forking import ForkConfig
from race_jax.train.rl_config import CoverConfig, PolicyLossConfig, PolicyRunConfig

CreditRule = Literal["carl", "treerl", "treerpo", "arpo", "outcome", "inherit"]


def _plain_loss() -> PolicyLossConfig:
    return PolicyLossConfig(closure=0.0)


def _no_covers() -> CoverConfig:
    return CoverConfig(enabled=False)


@dataclasses.dataclass(frozen=True)
class CarlConfig(PolicyRunConfig):
    """One run of CARL. Everything that decides its result stands here and in `PolicyRunConfig`.

    With `logic.enabled: true`, LoGiC's covers of a tree's successful paths mask reasoning in the
    update and, with `loss.closure` above 0, teach closing: RACE and CARL in one.

    Attributes:
        tree: How a task's tree grows.
        credit: How its edges are credited, by the names of `carl.advantages.Credit`; `carl` is the
            paper's.
        baseline: What a value is compared with: `mean`, the paper's, over all children of a state;
            `leave_one_out` over the others, exactly unbiased.
        share: Lay each shared state out once per row in an update. Off for models that read rows in
            order, and where `mesh.context` cuts the rows.
    """

    tree: ForkConfig = dataclasses.field(default_factory=ForkConfig)
    credit: CreditRule = "carl"
    baseline: Baseline = "mean"
    share: bool = True
    loss: PolicyLossConfig = dataclasses.field(default_factory=_plain_loss)
    logic: CoverConfig = dataclasses.field(default_factory=_no_covers)

    def __post_init__(self):
        super().__post_init__()
        if self.baseline != "mean" and self.credit not in ("carl", "inherit"):
            raise ValueError(
                f"baseline is {self.baseline} and credit {self.credit}, which has a baseline "
                "of its own; use mean."
            )
        if self.loss.reduction != "token-mean":
            raise ValueError(
                f"loss.reduction is {self.loss.reduction}; CARL's loss is a mean over the tokens "
                "of its update set, token-mean."
            )
        if not self.loss.normalize_std:
            raise ValueError(
                "loss.normalize_std is of race-jax rl, and credit decides here; leave it out."
            )
        if self.loss.adaptthink:
            raise ValueError(
                f"loss.adaptthink is {self.loss.adaptthink}; the bonus is of race-jax rl, leave it "
                "at 0."
            )
        if self.loss.closure and not self.logic.enabled:
            raise ValueError(
                f"loss.closure is {self.loss.closure} without covers to close by; set "
                "logic.enabled: true, or loss.closure: 0."
            )
        if self.share and self.mesh.context > 1:
            raise ValueError(
                f"mesh.context is {self.mesh.context} and share is true; rows that hold trees "
                "cannot be cut. Set share: false, or mesh.context: 1."
            )
