"""SIGKILL of the server while a client saves: nothing that was acknowledged is lost, and nothing is left over.

`make campaign-stores` does the same with a gateway of Ceph, and with its OSD.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.backends.stores.wrappers import retries
from tests.campaign.kills import servers_killed
from tests.support.object_server import PROGRAM, VARIABLES, object_server

KILLS = 12

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_killed_server_loses_nothing_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retries, "LONGEST_SECONDS", 0.2)  # The server is back within a second.
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with object_server(tmp_path, keeps_data=True) as server:
        counts = servers_killed(server, [PROGRAM], seed=seed, kills=KILLS)
    print(dict(counts))
    assert counts[f"killed {PROGRAM}"] == KILLS
    assert counts["retries"] > 0 and counts["acknowledged steps"] > KILLS
