"""The words: names that the field's terms replaced do not come back, and no module hides a public name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import FILES, PACKAGE, ROOMS, name_of, tree_of

RETIRED = {
    # Leases and coordination.
    "Tenure": "WriterLease",
    "tenure": "writer_lease",
    "_Pulse": "_Heartbeat",
    "pulse": "heartbeat",
    "beat": "heartbeat",
    "Reading": "ReaderLease",
    "Readers": "ReaderLeases",
    "is_going": "is_being_deleted",
    "Board": "KeyValueStore",
    "ThreadBoard": "ThreadKeyValueStore",
    "OwnBoard": "OwnKeyValueStore",
    "Ballot": "CommitVote",
    "ballot": "commit_vote",
    "Undecided": "OutcomeUnknown",
    "Alarm": "ExitAgreement",
    "alarm": "exit_agreement",
    "Departure": "PreemptionHandler",
    "departure": "preemption_handler",
    "is_time": "should_stop",
    "Opening": "SaveAgreement",
    "speaks": "is_leader",
    "heard": "announcement_for, verdict",
    # Telemetry.
    "Audience": "EventDispatcher",
    "audience": "dispatcher",
    "FAREWELL_SECONDS": "DRAIN_TIMEOUT_SECONDS",
    "hear": "on_event",
    "Account": "OperationTrace",
    # Saving and loading.
    "Digests": "StateFingerprint",
    "Choice": "StepChoice",
    "StepSelector": "StepChoice",
    "One": "StepChoice",
    "Newest": "StepChoice",
    "PassedOver": "SkippedStep",
    "Unchanged": "Deduplicator",
    "Previous": "BaseStep",
    "left_of": "pieces_to_write",
    "heads": "first_page_digests",
    "heads_of": "first_page_digests",
    "_certify": "_check_unmodified",
    "_hold_up": "_block_training",
    "_keep_as_it_is": "_snapshot_unfenced",
    "keep_as_it_is": "backup",
    "CollectorPause": "gc_paused",
    "is_little": "is_small_transfer",
    # Runs and repository.
    "Distrust": "SuspectSteps",
    "Collector": "CheckpointGC",
    "Survey": "Inventory",
    "Doomed": "Unreferenced",
    "doomed": "unreferenced",
    "spared": "pinned",
    "stands_at": "current_step",
    "standing_fence": "current_fence",
    "admitted": "accepted_steps",
    "vacated": "clear_fenced",
    "noted": "list_records",
    "set_aside": "supersede",
    "adopted": "index_foreign",
    "mended": "correct_bit_flip",
    # Checkpoint, engine, plan, format.
    "Place": "CheckpointLocation",
    "Overlay": "OverlayStore",
    "Crew": "WorkerPool",
    "crew": "worker_pool",
    "have_carried_out": "run_workers",
    "Slabs": "BufferPool",
    "slabs": "buffers",
    "new_slab": "allocate_aligned",
    "each_in_flight": "ordered_parallel_map",
    "carry_out": "execute",
    "Weighing": "ExchangeProbe",
    "Pace": "Throughput",
    "Moved": "TransferStats",
    "APART": "OPAQUE_FOLDER",
    "Leaf": "ScalarCodec",
    "Nearby": "PieceIntervals",
    # Foreign.
    "Named": "GlobalName",
    "Instance": "OpaqueObject",
    "Refusal": "UnsupportedPickle",
    "Spend": "charge",
    "spend": "charge",
    "Alike": "ArchiveTemplate",
    "Windows": "TailPrefetch",
    # House 3.
    "HeldPart": "LocalPart",
    "LocatedHeld": "LocatedShards",
    "OutsideState": "CustomState",
    "outside_state": "custom_state",
    "load_made_entries": "load_extra_entries",
    "MeshSlots": "MeshNumbers",
    "KnownSteps": "InventoryCache",
    "OpeningFacts": "RunFacts",
    "opening_facts": "run_facts",
    "CodingHistory": "CompressionStats",
    "CodingHistories": "AllCompressionStats",
    "torn_steps": "incomplete_steps",
    "finish_withdrawals": "finish_removals",
    "withdraw": "remove_manifest",
    "stranger_at": "foreign_file_at",
    # Settings.
    "reuse_unchanged": "deduplicate",
    "in_place_bytes_min": "zero_copy_bytes_min",
    "reference_roots": "allowed_roots",
    "lazy_verify": "verify_lazy_copy",
}
"""Retired identifiers, each with its replacement.

Left out, for they are ordinary English or names of other interfaces: `account`, `answer`, `collector` (Python's),
`counts` (numbers), `enter` and `leave`, `exchange`, `going`, `level` (logging), `lift`, `listing`, `moving`, `note`,
`noun`, `opening` (a file), `plain`, `previous`, `reading`, `retire`, `settle`, `survey`, `windows` (of an export).
"""

ON_DISK = {
    "passed_over": "a field of load reports and of the JSON of reports",
}
"""Names of the table's language that are stored or printed, and therefore stay."""

PENDING = {
    "beat": "stored/repository/epochs.py",
    "noted": "training/runs/removal/garbage_collection.py",
    "Place": "backends/foreign/deepspeed/folder.py",
    "spend": "backends/foreign/pickles/constructors.py",
}
"""Retired names that the named files still use: their rewrite is under way. A name that is gone fails the test."""

RETIRED_ROOMS = {"manager", "spec", "formats", "metrics"}


def identifiers_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each name that code defines or uses, with its line; text in strings and comments does not count."""
    for node in ast.walk(tree_of(path)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield node.id, line
        elif isinstance(node, ast.Attribute):
            yield node.attr, line
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, line
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg, line
        elif isinstance(node, ast.alias):
            yield from ((part, line) for part in node.name.split("."))
            if node.asname:
                yield node.asname, line
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((part, line) for part in node.module.split("."))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, line


def test_no_retired_name_comes_back() -> None:
    used: dict[str, list[str]] = {}
    for path in FILES:
        for name, line in identifiers_in(path):
            if name in RETIRED:
                used.setdefault(name, []).append(f"{name_of(path)}:{line}")
    wrong = {name: (RETIRED[name], places[:3]) for name, places in used.items() if name not in PENDING}
    assert not wrong, f"retired names, each with its replacement and the first places: {wrong}"
    unneeded = PENDING.keys() - used.keys()
    assert not unneeded, f"no longer used; remove from PENDING: {sorted(unneeded)}"


def test_no_replacement_is_itself_retired() -> None:
    assert not RETIRED.keys() & {name for text in RETIRED.values() for name in text.split(", ")}
    assert not RETIRED.keys() & ON_DISK.keys()


def test_no_retired_room_comes_back() -> None:
    assert not RETIRED_ROOMS & {room.name for room in ROOMS if room.parent == PACKAGE}


def test_no_module_hides_a_public_name() -> None:
    """Importing a module `holdfast.export` would overwrite the function `export` on the package."""
    import holdfast

    names = {room.name for room in ROOMS if room.parent == PACKAGE} | {path.stem for path in PACKAGE.glob("*.py")}
    assert not names & set(holdfast.__all__)
