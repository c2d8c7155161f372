import numpy as np
import pytest

from race_jax.prefixes import common_length


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 3], [1, 2], 1)],
)
def test_the_common_beginning(a, b, want):
    assert common_length(a, b) == common_length(b, a) == want
    assert common_length(np.array(a, np.int32), tuple(b)) == want
