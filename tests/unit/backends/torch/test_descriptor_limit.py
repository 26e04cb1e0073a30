"""Whether rank 0 may open a connection for every rank."""

from __future__ import annotations

import logging
import resource

import pytest

from holdfast.backends.torch.descriptor_limit import descriptor_shortage, warn_of_descriptor_limit


@pytest.mark.parametrize(("world_size", "limit"), [(153, 1024), (13_107, 65_792), (10**6, resource.RLIM_INFINITY)])
def test_a_limit_that_carries_the_world_is_no_shortage(world_size: int, limit: int) -> None:
    assert descriptor_shortage(world_size, limit) is None


def test_a_limit_that_is_too_low_is_named_once_with_what_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING, "holdfast"):
        warn_of_descriptor_limit(limit)
        warn_of_descriptor_limit(limit)
    (record,) = caplog.records
    assert f"RLIMIT_NOFILE is {limit:,}" in record.getMessage()
    assert f"`ulimit -n {5 * limit + 256}`" in record.getMessage()
