"""The order of durability: every name below a step is durable before the manifest gets its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.doubles.faults import Faults
from tests.support.crashed_run import NEW, OLD, committed_at, local_store, run_at, training_state


@pytest.mark.parametrize("staging", ["copy", "none"])
def test_every_name_is_durable_before_the_manifest_appears(tmp_path: Path, staging: str) -> None:
    root, recording = tmp_path / "root", Faults()
    committed_at(root, OLD)
    run = run_at(local_store(root, recording))
    if staging == "none":
        run._job.arena._bytes_max = 0
    run.load(training_state(OLD), OLD)
    recording.seen.clear()
    report = run.save(NEW, training_state(NEW)).wait()
    assert report is not None and report.staging == staging
    run.close()
    step = root / f"step-{NEW:012d}"
    attempt = step / report.attempt
    names = [(seen.name, Path(str(seen.subject))) for seen in recording.seen]
    published = max(n for n, (name, path) in enumerate(names) if name == "link" and path.parent == step)
    before = names[:published]
    for folder in (attempt / "parts", attempt, step, root):
        # A file is synced after its name was made, a small object gets its name by a link, a folder by mkdir.
        named = [
            n
            for n, (name, path) in enumerate(before)
            if os.path.dirname(path) == str(folder)
            and (name in ("link", "mkdir") or (name == "fsync" and path.suffix == ".safetensors"))
        ]
        synced = [n for n, (name, path) in enumerate(before) if name == "fsync" and path == folder]
        assert named, f"{folder} holds nothing"
        assert synced and synced[-1] > named[-1], f"{folder} has a name that a power cut may take"
        if folder == attempt:
            links = [n for n, (name, path) in enumerate(before) if name == "link" and path.suffix == ".safetensors"]
            assert len(links) == 1, "one call for the pack with the frozen tensor"
            assert synced[-1] > links[0], "a power cut may take the link"
