"""How many bytes of index a compressed chunk takes: the real planning and commit code, on a simulated job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import conditions
from bench.compression_on_paper import PaperCoding
from bench.opening_on_paper import opened
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.scale import SETTINGS, committed_apart, location_at, write_parts
from bench.synthetic import dense


def measure(root: Path, params: Params) -> Measured:
    """Commit the job whose index `bench.scale` measures without compression."""
    job = replace(dense(params["ranks"]), is_mixed=bool(params["is_mixed"]))
    done = opened(job, location_at(root), SETTINGS)
    written = write_parts(root, job, done, None, PaperCoding(SETTINGS))
    votes = [[vote.part_bytes, vote.part_digest] for vote in written.votes]
    (root / "votes.json").write_text(json.dumps({"attempt": written.attempt, "votes": votes}))
    found = committed_apart(root, cut=False)
    each: Round = {"index_bytes": found["index_bytes"], "chunks": written.chunks, "pieces": written.pieces}
    counts = f"{written.pieces:,} pieces, {written.chunks:,} chunks, {found['index_bytes']:,.0f} bytes of index"
    conditions.say(f"{job.name}: {counts}")
    conditions.removed(root)
    return Measured([each], [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return bytes of index ÷ chunks."""
    return {"index_bytes_per_chunk_coded": spread_of([each["index_bytes"] / each["chunks"] for each in rounds])}


PART = Part(
    name="paper",
    question="How many bytes of index does a compressed chunk take?",
    ranks=1,
    full={"ranks": 16384, "is_mixed": 0},
    quick={"ranks": 1024, "is_mixed": 0},
    measure=measure,
    keys=keys,
)
