"""Jobs on paper: planned, committed and planned for loading by the real code, at a size that a test can afford."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import scale
from bench.objects_on_paper import PAGE_ENTRIES
from bench.synthetic import SyntheticJob, dense, llama_405b, mixture, targets


@pytest.mark.long
@pytest.mark.parametrize(("job", "loads"), [(dense(128), True), (mixture(1024), False)], ids=("dense", "mixture"))
def test_a_job_on_paper_is_committed_and_loaded_on_other_layouts(
    job: SyntheticJob, loads: bool, tmp_path: Path
) -> None:
    # Commit proves that what the ranks planned covers every tensor once, load plans that they fill all that is held.
    found = scale.measured(job, tmp_path / "job", loads=loads)
    assert found["imbalance"] < 1.05
    assert found["index_bytes_per_chunk"] < 64
    assert found["plan_seconds"] < 10
    names = 4 * sum(map(len, job.layers))
    assert found["save_bytes_into_rank0"] <= 512 * job.world_size + 100 * names
    if loads:
        statuses = found["load_bytes_in_per_rank"] - found["given_bytes"]
        assert statuses <= 64 * job.world_size + names + (512 << 10), "offers of reads may take 512 KiB"


@pytest.mark.long
def test_a_job_whose_packs_are_cut_is_committed_by_pages(tmp_path: Path) -> None:
    job = replace(dense(128), layers=llama_405b()[:18])
    found = scale.measured(job, tmp_path / "job", loads=False, cut=True)
    assert found["packs"] > 50 * job.world_size
    pages = -(-found["packs"] // PAGE_ENTRIES)
    assert found["commit_requests_list"] == found["load_look_requests"] == pages
    assert "commit_requests_size" not in found, "no pack is asked for by itself"
    assert found["commit_requests_get"] == job.world_size
    assert found["index_bytes_per_chunk"] < 64


@pytest.mark.long
def test_ranks_of_a_target_hold_every_tensor_once() -> None:
    for job in targets(128):
        held: dict[str, int] = {}
        for rank in range(job.world_size):
            for shard in job.shards_of(rank):
                if shard.holders is not None and shard.holders[0] == rank:
                    held[shard.tensor.fqn] = held.get(shard.tensor.fqn, 0) + sum(each.numel for each in shard.pieces)
        shapes = {f"model.{weight.name}": weight.shape for layer in job.layers for weight in layer}
        for fqn, shape in shapes.items():
            count = 1
            for length in shape:
                count *= length
            assert held[fqn] == count, fqn
