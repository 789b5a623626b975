"""Sums in the order of the ranks, whoever takes them."""

import numpy as np
import pytest

from collectives.schedule.model import in_rank_order


@pytest.mark.parametrize("ranks", [[0], [0, 1], [2, 5], [0, 1, 2], [1, 4, 6, 7], list(range(7))])
def test_the_sum_is_that_from_the_lowest_rank_up_whoever_adds(ranks):
    rng = np.random.default_rng(len(ranks))
    vectors = {rank: rng.normal(size=100).astype(np.float32) * 10.0**rank for rank in ranks}
    expected = np.cumsum([vectors[rank] for rank in ranks], axis=0, dtype=np.float32)[-1]
    for owner in ranks:
        terms = {rank: vector.copy() for rank, vector in vectors.items()}
        for to, of in in_rank_order(owner, terms):
            terms[to] += terms[of]
        assert terms[owner].tobytes() == expected.tobytes()
