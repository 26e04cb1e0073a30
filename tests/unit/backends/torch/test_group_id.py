"""All ranks of a group name it alike; lives of a job that share a key-value store do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from holdfast.backends.torch.comm import ProcessGroupComm


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _name(monkeypatch: pytest.MonkeyPatch, restarts: str, agent_store: str) -> str:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    return ProcessGroupComm(None).group_id


def test_lives_that_share_the_store_of_an_agent_differ(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _name(monkeypatch, "0", "True") != _name(monkeypatch, "1", "True")


def test_ranks_whose_agents_have_counted_other_restarts_agree(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that came back counts from 0. Each life then has a store of its own."""
    assert _name(monkeypatch, "0", "False") == _name(monkeypatch, "1", "False")
