"""Connections to the host of the key-value store, and the calls that ranks make to it on their training threads."""

from __future__ import annotations

import pytest

from bench.connections import announced_step_calls, connections_per_rank
from holdfast.backends.torch.descriptor_limit import CONNECTIONS_PER_RANK


@pytest.mark.long
def test_a_rank_has_no_more_connections_than_rank_0_checks_its_limit_for() -> None:
    counts = connections_per_rank(ranks=2)
    assert 2 <= counts["connections_per_rank_at_rest"] <= counts["connections_per_rank"], counts
    # Three in most runs. Four where a save begins while the one before it waits for its outcome.
    assert counts["connections_per_rank"] <= CONNECTIONS_PER_RANK, counts


def test_no_rank_stores_or_reads_announcements_on_its_training_thread() -> None:
    """Each call there would hold up every rank at the same step: the store answers them one after the other."""
    calls = announced_step_calls(steps=150)
    assert calls["announced_step_calls_on_training_thread"] == 0, calls
    assert calls["announced_step_calls"] > 0, "rank 0 announces, and rank 1 reads"
