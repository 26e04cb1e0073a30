"""Two real ranks load a step of which no root has every chunk: alone, or with bytes that the other rank read."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

MODULE = "tests.distributed.loads.two_root_cases"
KINDS = [(share, compression) for share in ("never", "always") for compression in ("off", "on")]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two-roots")
    cases = [
        Case(
            f"{MODULE}:load_from_both",
            {"root": str(folder / f"{share}-{compression}"), "share_reads": share, "compression": compression},
            f"{share}-{compression}",
        )
        for share, compression in KINDS
    ]
    return run_world(2, cases, folder / "world")


@pytest.mark.parametrize(("share", "compression"), KINDS)
def test_each_rank_gets_every_chunk_from_where_it_is_whole(results: Results, share: str, compression: str) -> None:
    values = results.values(f"{share}-{compression}")
    for value in values:
        assert isinstance(value, dict) and value["same"]
        assert sum(value["sources"].values()) == value["bytes"]
    assert (sum(value["exchanged"] for value in values) > 0) is (share == "always")
    assert {place for value in values for place in value["sources"]} == {"near", "far"}
