import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.common.hashing import key_of
from bessemer.tokens import order


def permute(key: int, positions: object, size: int) -> np.ndarray:
    positions = np.atleast_1d(positions)
    return order.permute([key], np.zeros(len(positions), np.intp), positions, size)


def positions_of(key: int, items: object, size: int) -> np.ndarray:
    items = np.atleast_1d(items)
    return order.permute([key], np.zeros(len(items), np.intp), items, size, is_inverse=True)


def test_keys_give_different_orders_that_look_random() -> None:
    size = 20_000
    first, second = permute(1, np.arange(size), size), permute(2, np.arange(size), size)
    assert not np.array_equal(first, second)
    for items in (first, second):
        # Neighbours in the order are no neighbours in the data, and positions do not follow the data.
        assert abs(np.corrcoef(np.arange(size), items.astype(float))[0, 1]) < 0.03
        assert np.mean(np.abs(np.diff(items.astype(np.int64))) < 10) < 0.005
    assert np.mean(first == second) < 0.001


def test_a_position_outside_is_refused() -> None:
    for function in (permute, positions_of):
        with pytest.raises(ValueError, match="outside"):
            function(0, [5], 5)


def test_the_order_is_the_same_on_every_machine() -> None:
    """Values written down: a change of the arithmetic would replay other data into a resumed run."""
    assert key_of("epoch", 0, "code", 0) == GOLDEN_KEY
    assert permute(GOLDEN_KEY, np.arange(8), 1000).tolist() == GOLDEN_ORDER


GOLDEN_KEY = 17617507302213195016
GOLDEN_ORDER = [895, 786, 569, 268, 42, 901, 820, 47]


@given(st.integers(1, 2**60), st.integers(0, 2**64 - 1), st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
@settings(max_examples=100, deadline=None)
def test_the_order_of_many_items_runs_backwards_too(size: int, key: int, shares: list[float]) -> None:
    positions = np.array([min(int(share * size), size - 1) for share in shares], dtype=np.uint64)
    assert np.array_equal(positions_of(key, permute(key, positions, size), size), positions)
    assert np.array_equal(permute(key, positions_of(key, positions, size), size), positions)
