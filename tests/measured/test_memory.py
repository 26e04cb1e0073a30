"""What saving, loading and exporting 2 GiB take of memory: windows and the budget that was given, not the state.

All in one file: those who run the suite in several processes give them one file each, and this is one 2 GiB at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast

MIB = 1 << 20
EXTRA_MIB = 256
EXPORT_EXTRA_MIB = 200

SAVE_AND_LOAD = """
import json, sys
import torch
import holdfast

def peak_mib():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) >> 10

def forget_peak():
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")

path, kind = sys.argv[1:]
torch.set_num_threads(1)
if kind == "rows":
    state = {str(n): torch.full((64, 1 << 20), float(n)) for n in range(8)}
else:
    # A strided copy takes time by the element.
    state = {str(n): torch.full((1 << 14, 1 << 13), float(n), dtype=torch.float64).t() for n in range(2)}
holdfast.save(path + "/warm", {"x": torch.zeros(4)}, process_group=False)
forget_peak()
before = peak_mib()
holdfast.save(path + "/large", state, process_group=False)
saved = peak_mib() - before
for tensor in state.values():
    tensor.fill_(-1.0)
forget_peak()
before = peak_mib()
holdfast.load(path + "/large", state, process_group=False)
loaded = peak_mib() - before
right = all(bool((tensor == float(name)).all()) for name, tensor in state.items())
bytes_ = sum(tensor.nbytes for tensor in state.values())
print(json.dumps({"saved": saved, "loaded": loaded, "right": right, "bytes": bytes_}))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rows", "transposed"])
def test_saving_and_loading_2_gib_adds_little_memory(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", SAVE_AND_LOAD, str(tmp_path), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["bytes"] == 2048 * MIB
    assert found["right"]
    assert found["saved"] < EXTRA_MIB, found
    assert found["loaded"] < EXTRA_MIB, found


EXPORT = """
import json, resource, sys
from holdfast import api
source, target, memory, workers, dtype = sys.argv[1:]
report = api.export(source, target, to="safetensors", memory_bytes=int(memory), workers=int(workers),
                    dtype=dtype or None, shard_bytes=700_000_000)
# Not ru_maxrss: that counts what the process was before it became this program.
own = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss if int(workers) > 1 else 0
print(json.dumps({"peak": (own + children * int(workers)) >> 10, "read": report.read_bytes, "bytes": report.bytes}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "saved"
    state = {f"rows{n}": torch.full((64, 1 << 20), float(n)) for n in range(7)}
    state |= {f"long{n}": torch.full((1 << 25,), float(n)) for n in range(2)}
    holdfast.save(path, {"model": state}, process_group=False)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("memory_mib", "workers", "dtype"), [(64, 1, ""), (512, 1, ""), (1024, 1, "bfloat16"), (256, 2, "")]
)
def test_an_export_keeps_within_its_budget(
    tmp_path: Path, source: Path, memory_mib: int, workers: int, dtype: str
) -> None:
    command = [sys.executable, "-c", EXPORT, source, tmp_path / "out", str(memory_mib * MIB), str(workers), dtype]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    print(found)
    assert found["bytes"] > 2000 * MIB / (2 if dtype else 1)
    assert found["peak"] < memory_mib + EXPORT_EXTRA_MIB, found
    if memory_mib >= 512:
        assert found["read"] < 1.05 * 2048 * MIB, found


SAVE_IN_GROUP = """
import os, sys, tempfile
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
import torch, holdfast
state = {f"w{k}": torch.ones(16 << 20) for k in range(6)}
with holdfast.CheckpointManager(tempfile.mkdtemp() + "/run", process_group=False) as manager:
    print(manager.save(1, state).wait().staging)
"""
STATE_MIB, GROUP_MIB = 384, 900


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of version 1 with a limit, below the group of this process."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a control group")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((path for _, controllers, path in (line.split(":", 2) for line in lines) if controllers == "memory"), "")
    group = Path("/sys/fs/cgroup/memory", own.lstrip("/"), f"holdfast-test-{os.getpid()}")
    if not own or not (group.parent / "memory.limit_in_bytes").exists():
        pytest.skip("needs control groups of version 1, in which a group with processes may have groups below it")
    try:
        group.mkdir()
    except OSError as refusal:
        pytest.skip(f"no control group can be made here: {refusal}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(GROUP_MIB * MIB))
        yield group
    finally:
        group.rmdir()


def test_a_save_in_a_limited_group_is_written_at_the_call_instead_of_killed(tmp_path: Path, memory_group: Path) -> None:
    command = [sys.executable, "-c", SAVE_IN_GROUP, str(memory_group)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    # The state is more than half of what the limit leaves beside it: copies would go beyond it.
    assert ended.stdout.split() == ["none"], ended.stdout
    peak = int((memory_group / "memory.max_usage_in_bytes").read_text())
    assert peak <= GROUP_MIB * MIB
