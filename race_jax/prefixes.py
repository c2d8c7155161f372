"""Sequences that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_length(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """The length of the longest common beginning.

    Example:
        >>> common_length([1, 2, 3], [1, 2, 4, 5]), common_length([], [1])
        (2, 0)
    """
    size = min(len(a), len(b))
    differing = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differing[0]) if differing.size else size
