"""Holdfast at 16,384 ranks, without the ranks: the real planning, index and commit code on simulated jobs.

Limit: no rank waits for another here, and all files are on the disk of one machine. Seconds are those of one rank's own
work; bytes, calls and memory are those of the real code.

`python -m bench.scale` runs the dense 405B job at 1,024, 4,096 and 16,384 ranks and a mixture of experts at 2,048,
prints what one rank and the committing rank do, and merges its keys into `bench/results/scale.json`. Keys that begin
with `cut_` are of the dense job in a store of objects, where packs are cut.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from bench.compression_on_paper import PaperCoding
from bench.load_on_paper import Given, bytes_into_rank
from bench.objects_on_paper import OBJECT_BYTES_MAX, PACKS_FILE, PaperObjects, write_packs
from bench.opening_on_paper import STEP, Opened, opened, opened_with_a_difference, packs_on, paper_context
from bench.redo_on_paper import redo_bytes_into_rank
from bench.silence_on_paper import calls_with_a_dead_rank
from bench.synthetic import SyntheticJob, dense, mixture, targets
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES, chunk_count
from holdfast.base.geometry.tensor import Shard
from holdfast.base.ports.readable import StoreTraits
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord
from holdfast.base.types.plan import WantedBoxes
from holdfast.core.engine.gc_pause import GcPause
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.names import part_name, step_folder
from holdfast.core.format.pack import pack_digest
from holdfast.core.format.part import RankPart, encode_part
from holdfast.core.plan.packing import PackSizes
from holdfast.core.plan.reads import load_plan
from holdfast.settings import Settings
from holdfast.stored.checkpoint.index_loading import index_for, index_frames, resolved_frames
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at
from holdfast.stored.checkpoint.pack_sizes import short_packs
from holdfast.stored.repository.catalog import ensure_run, read_manifest
from holdfast.stored.repository.publish import publish
from holdfast.training.coordination.agreement.records import Agreement
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.runs.listing import run_record
from holdfast.training.runs.removal.garbage_collection import planned
from holdfast.training.saving.commit import assemble
from holdfast.training.saving.rank_packs import sizes_of_packs
from holdfast.training.saving.rank_part import layouts_of

HERE = Path(__file__).parent
ROOT = HERE.parent / "runs" / "scale"
RESULTS = HERE / "results" / "scale.json"
REPLY_SECONDS = 0.02
"""How late the replies of a store of objects come in the measurements called `late`."""
RANKS, MIXTURE_RANKS = (1024, 4096, 16384), 2048
SETTINGS = Settings()
GROWING = (
    "plan_seconds",
    "save_bytes_into_rank0",
    "store_calls_dead_rank",
    "commit_seconds",
    "load_plan_seconds",
    "load_plan_fsdp_seconds",
    "load_bytes_in_per_rank",
    "redo_recover_bytes_in_per_rank",
    "index_bytes",
)

Numbers = dict[str, float]


@dataclass(frozen=True)
class Written:
    """The files that the ranks of a job have written before one rank commits."""

    attempt: str
    votes: list[Vote]
    pieces: int
    chunks: int
    imbalance: float
    """The worst of all classes: most bytes of a rank over the mean of its class."""

    part_bytes: int
    packs: int


def location_at(root: Path, reply_seconds: float = 0.0) -> CheckpointLocation:
    """Return the location of the checkpoint of a simulated job, in a store of objects if its packs are on paper."""
    store: Store = LocalStore(root, settings=SETTINGS)
    if (root / PACKS_FILE).exists():
        store = PaperObjects(store, root, reply_seconds)
    return CheckpointLocation(store, step_folder(STEP), STEP)


def write_parts(
    root: Path, job: SyntheticJob, done: Opened, sizes: PackSizes | None, coding: PaperCoding | None = None
) -> Written:
    """Plan every rank of a job, write its part file, and create an empty file of the right size for each of its packs.

    Digests and stored lengths are invented; everything else is what the rank would write. Packs that are cut are noted,
    not created.
    """
    chance = random.Random(7)
    noted: list[tuple[str, int]] = []
    attempt = root / step_folder(STEP) / done.agreement.attempt
    (attempt / "parts").mkdir(parents=True)
    votes, loads = [], []
    pieces = chunks = 0
    for rank in range(job.world_size):
        members = done.classes[job.stage_of(rank)]
        agreement = replace(done.agreement, class_ranks=members, is_leader=rank == members[0])
        collected = job.collected_on(rank)
        tensors = [each.shard.tensor for each in collected.shards] if agreement.is_leader else []
        listing = IndexBuilder(SETTINGS.chunk_bytes, tensors)
        records = []
        choice = None if coding is None else coding.choice_of
        for pack, header in packs_on(rank, collected, agreement, SETTINGS, sizes, choice):
            digests = [
                chance.randbytes(DIGEST_BYTES * chunk_count(item.bytes, SETTINGS.chunk_bytes)) for item in pack.items
            ]
            codings = coding.codings_of(pack) if coding is not None and pack.is_coded else []
            listing.add_pack(pack, len(header), digests, codings)
            pieces += len(digests)
            chunks += sum(map(len, digests)) // DIGEST_BYTES
            data_bytes = sum(each.starts[-1] for each in codings) if pack.is_coded else pack.data_bytes
            pack_bytes = len(header) + data_bytes
            records.append(FileRecord(pack.name, pack_bytes, pack_digest(header, b"".join(digests))))
            noted.append((f"{step_folder(STEP)}{attempt.name}/{pack.name}", pack_bytes))
            if sizes is None:
                (attempt / pack.name).parent.mkdir(exist_ok=True)
                (attempt / pack.name).touch()
                os.truncate(attempt / pack.name, pack_bytes)
        digests_of = done.digests[job.stage_of(rank)]
        part = RankPart(
            rank=rank,
            attempt=done.agreement.attempt,
            index=listing.index(),
            packs=tuple(records),
            tree=digests_of.tree_bytes if agreement.is_leader else None,
            aliases={},
            layouts=layouts_of(collected) if agreement.is_leader else (),
            per_rank=digests_of.per_rank_bytes,
        )
        data = encode_part(part)
        (attempt / part_name(rank)).write_bytes(data)
        votes.append(Vote(len(data), hex_digest_of(data)))
        loads.append(sum(record.bytes for record in records))
    if sizes is not None:
        write_packs(root, noted)
    worst = max(
        max(loads[each] for each in members) / (sum(loads[each] for each in members) / len(members))
        for members in done.classes
    )
    part_bytes = sum(vote.part_bytes for vote in votes)
    return Written(attempt.name, votes, pieces, chunks, worst, part_bytes, len(noted))


def forget_pages(root: Path) -> None:
    """Make every file durable and drop it from the page cache, so that the next reader reads storage."""
    os.sync()
    for path in root.rglob("*.msgpack"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def committed(root: Path, reply_seconds: float) -> Numbers:
    """Do what the committing rank does, from the votes to the published manifest."""
    told = json.loads((root / "votes.json").read_text())
    place = location_at(root, reply_seconds)
    votes = [Vote(*each) for each in told["votes"]]
    agreement = Agreement(0, told["attempt"], (0,), {}, True, (), None, paper_context(False))
    # Rank 0's own objects would need a state; the committing rank uses the location and the parent only.
    target = SimpleNamespace(location=place, parent=lambda: None, log=None)
    start, processor = time.perf_counter(), time.process_time()
    data, _ = assemble(target, agreement, votes, SETTINGS, [])
    publish(place.store, place.manifest_key, data)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor
    requests = place.store.requests if isinstance(place.store, PaperObjects) else {}
    found = {f"commit_requests_{name}": count for name, count in sorted(requests.items())}
    indexes = read_manifest(place.store, place.folder).indexes
    return found | {
        "commit_seconds": seconds,
        "commit_processor_seconds": processor_seconds,
        "commit_peak_mib": peak_mib(),
        "manifest_bytes": len(data),
        "index_files": len(indexes),
        "index_bytes": sum(each.bytes for each in indexes),
    }


def boxes_of(shard: Shard) -> tuple[Box, ...]:
    """Return the boxes of a tensor that a rank needs."""
    return tuple(each for each in shard.pieces if isinstance(each, Box))


def load_planned(root: Path, job: SyntheticJob) -> Numbers:
    """Do what one rank of a loading job does until it knows every read: index files cold, proof and plan."""
    rank = job.world_size * 5 // 8 + 3
    place = location_at(root)
    wanted = [WantedBoxes(each.tensor.fqn, boxes_of(each)) for each in job.shards_of(rank)]
    manifest = read_manifest(place.store, place.folder)
    # What rank 0 reads and gives to every rank, before this one plans.
    frames = [manifest_bytes_at(place), *index_frames(place, manifest)]
    start, processor = time.perf_counter(), time.process_time()
    with GcPause():
        _, stored = resolved_frames(frames, place)
        boxes = [(each.stored_fqn, box) for each in wanted for box in each.boxes]
        index = index_for(stored, boxes, SystemClock(), place)
        plan = load_plan(wanted, index.pieces_near, SETTINGS._tuning.read_window_bytes)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor
    # Before what follows takes memory that no rank of a job takes.
    peak = peak_mib()
    held = sum(shard.tensor.itemsize * piece.numel for shard in job.shards_of(rank) for piece in shard.pieces)
    filled = sum(part.box.numel * 4 for run in plan.runs for chunk in run.chunks for part in chunk.parts)
    assert held == filled, (held, filled)
    total = sum(each.bytes for each in manifest.indexes)
    return {
        "load_plan_seconds": seconds,
        "load_plan_processor_seconds": processor_seconds,
        "given_bytes": sum(map(len, frames)),
        "load_bytes_in_per_rank": bytes_into_rank(job, Given(frames, manifest, stored, plan), SETTINGS),
        "index_bytes_read_per_rank": stored.bytes_read / total if isinstance(stored, SplitIndex) else 1.0,
        "load_plan_peak_mib": peak,
        "load_read_amplification": plan.bytes / held,
    }


def looked(root: Path, reply_seconds: float) -> Numbers:
    """Do what rank 0 of a load does to the packs, and what a listing and a collection of the run do to the step."""
    place = location_at(root, reply_seconds)
    assert isinstance(place.store, PaperObjects)
    manifest = read_manifest(place.store, place.folder)
    place.store.requests.clear()
    start = time.perf_counter()
    assert not short_packs(place.store, place.folder, manifest, place.packs_of(manifest))
    found: Numbers = {
        "load_look_late_seconds": time.perf_counter() - start,
        "load_look_requests": place.store.requests.total(),
        "load_look_peak_mib": peak_mib(),
    }
    del manifest
    ensure_run(place.store, "paper", paper_context(False).created)
    place = location_at(root)
    for name, verb in (
        ("ls", lambda: run_record(place.store)),
        ("collect", lambda: planned(place.store, SystemClock(), None)),
    ):
        start = time.perf_counter()
        verb()
        found |= {f"{name}_seconds": time.perf_counter() - start, f"{name}_peak_mib": peak_mib()}
    return found


def peak_mib() -> float:
    """Return the peak memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def apart(root: str, *arguments: str) -> Numbers:
    """Return the measurements of a step that runs in its own process, with its own memory."""
    command = [sys.executable, "-m", "bench.scale", "--root", root, *arguments]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def committed_apart(root: Path, *, cut: bool) -> Numbers:
    """Return the measurements of a commit; of one in a store of objects, also those with late replies."""
    found: Numbers = {}
    forget_pages(root)
    if cut:
        late = apart(str(root), "--commit", "--reply-seconds", str(REPLY_SECONDS))
        found["commit_late_seconds"] = late["commit_seconds"]
        for pattern in ("manifest.json", "*/index-*", "*/overview*"):
            for path in (root / step_folder(STEP)).glob(pattern):
                path.unlink()
        forget_pages(root)
    return found | apart(str(root), "--commit")


def measured(job: SyntheticJob, root: Path, *, loads: bool, cut: bool = False) -> Numbers:
    """Take one job from the agreement to the load plans of other jobs, in a folder that is removed.

    Args:
        job: The job.
        root: The folder.
        loads: Whether other jobs load it.
        cut: Whether it saves to a store of objects.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    sizes = (
        sizes_of_packs(StoreTraits(object_bytes_max=OBJECT_BYTES_MAX, appears_whole=True), SETTINGS) if cut else None
    )
    done = opened(job, location_at(root), SETTINGS, sizes)
    start = time.perf_counter()
    written = write_parts(root, job, done, sizes)
    print(f"  {job.name}: parts of all ranks written in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    votes = [[vote.part_bytes, vote.part_digest] for vote in written.votes]
    (root / "votes.json").write_text(json.dumps({"attempt": written.attempt, "votes": votes}))
    found: Numbers = {"plan_seconds": done.plan_seconds}
    if not cut:  # What packs there are changes nothing of these.
        into_rank0, seconds = opened_with_a_difference(job, location_at(root), SETTINGS)
        found |= {"save_bytes_into_rank0": into_rank0, "difference_seconds": seconds}
        found |= calls_with_a_dead_rank(job, location_at(root), SETTINGS) | redo_bytes_into_rank(job, SETTINGS)
    found |= {
        "packs": written.packs,
        "pieces": written.pieces,
        "chunks": written.chunks,
        "part_bytes": written.part_bytes,
        "imbalance": written.imbalance,
        **committed_apart(root, cut=cut),
    }
    found["index_bytes_per_chunk"] = found["index_bytes"] / written.chunks
    print(f"  {job.name}: opened and committed; load plans follow", file=sys.stderr)
    if cut:
        found |= apart(str(root), "--look", "--reply-seconds", str(REPLY_SECONDS))
    for number, name in enumerate(("", "fsdp_") if loads else ()):
        forget_pages(root)
        more = apart(str(root), "--plan", str(number), "--ranks", str(job.world_size))
        found |= {key.replace("load_plan_", f"load_plan_{name}"): value for key, value in more.items() if not name} | {
            f"load_plan_{name}seconds": more["load_plan_seconds"],
            f"index_bytes_read_per_rank{'_fsdp' if name else ''}": more["index_bytes_read_per_rank"],
        }
    shutil.rmtree(root)
    return found


def show(names: list[str], found: list[Numbers], growing: int) -> None:
    """Print one column per job, and the growth of each cost over the first columns beside the growth of the job."""
    print(f"{'':30}" + "".join(f"{name:>26}" for name in names))
    for key in dict.fromkeys(key for each in found for key in each):
        cells = (
            f"{each[key]:,.4g}" if key in each and each[key] < 1e4 else f"{each.get(key, 0):,.0f}" for each in found
        )
        print(f"{key:30}" + "".join(f"{cell if cell != '0' else '-':>26}" for cell in cells))
    print("growth over the column before it, ranks growing 4 times (16 would be quadratic in ranks):")
    found = found[:growing]
    for key in GROWING:
        pairs = [(few, many) for few, many in pairwise(found) if key in few and key in many]
        if not pairs:
            continue
        print(f"  {key:28}" + "".join(f"{many[key] / few[key]:10.2f}" for few, many in pairs))


def by_ranks(jobs: list[SyntheticJob], found: list[Numbers]) -> Numbers:
    """Return the keys of jobs, each with the number of its ranks."""
    return {
        f"{key}_{job.world_size}": value for job, each in zip(jobs, found, strict=True) for key, value in each.items()
    }


def write(results: Path, keys: Numbers) -> None:
    """Merge keys into a file of results."""
    known = json.loads(results.read_text()) if results.exists() else {}
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps({**known, **{key: round(value, 4) for key, value in keys.items()}}, indent=1) + "\n")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, help="only the dense job, at so many ranks (a multiple of 128)")
    parser.add_argument("--redo", action="store_true", help="only what comes to a rank that redoes a log")
    parser.add_argument("--peers", action="store_true", help="only what is asked of 1,000 nodes of peers")
    parser.add_argument("--json", action="store_true", help="print the keys as JSON instead of a table")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the files of the job lie meanwhile")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file that takes the keys")
    parser.add_argument("--commit", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--reply-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.commit or arguments.look:
        print(json.dumps((committed if arguments.commit else looked)(arguments.root, arguments.reply_seconds)))
        return
    if arguments.plan is not None:
        print(json.dumps(load_planned(arguments.root, targets(arguments.ranks)[arguments.plan])))
        return
    if arguments.peers:
        from bench.peers_on_paper import measured as peers_measured

        peers = peers_measured()
        write(arguments.results, peers)
        print(json.dumps(peers, indent=1))
        return
    jobs = [dense(ranks) for ranks in ((arguments.ranks,) if arguments.ranks else RANKS)]
    if arguments.redo:
        redone = [redo_bytes_into_rank(job, SETTINGS) for job in jobs]
        write(arguments.results, by_ranks(jobs, redone))
        show([job.name for job in jobs], redone, len(jobs))
        return
    found = [measured(job, arguments.root, loads=True) for job in jobs]
    keys = by_ranks(jobs, found)
    keys["index_bytes_per_chunk"] = found[-1]["index_bytes_per_chunk"]
    dense_jobs, largest = len(jobs), jobs[-1]
    cut = measured(largest, arguments.root, loads=True, cut=True)
    keys |= {f"cut_{key}_{largest.world_size}": value for key, value in cut.items()}
    if not arguments.ranks:
        moe = mixture(MIXTURE_RANKS)
        jobs.append(moe)
        found.append(measured(moe, arguments.root, loads=False))
        keys |= {f"moe_{key}_{moe.world_size}": value for key, value in found[-1].items()}
        # The number of ranks does not change these.
        # Here and not at the top: it imports torch, and the peaks that other processes state would hold it.
        from bench.connections import announced_step_calls, connections_per_rank
        from bench.peers_on_paper import measured as peers_measured

        keys |= connections_per_rank() | announced_step_calls() | peers_measured()
    write(arguments.results, keys)
    if arguments.json:
        print(json.dumps(keys, indent=1))
    else:
        show([*(job.name for job in jobs), f"packs cut, {largest.world_size}"], [*found, cut], dense_jobs)
        for key in keys:
            if key.startswith(("connections", "announced", "peers")):
                print(f"{key:58}{keys[key]:,.4g}")


if __name__ == "__main__":
    main()
