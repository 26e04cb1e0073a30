"""What exporting 2 GiB takes of memory: the budget that was given, and an interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast

MIB = 1 << 20
EXTRA_MIB = 200

WORK = """
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


@pytest.mark.parametrize(
    ("memory_mib", "workers", "dtype"), [(64, 1, ""), (512, 1, ""), (1024, 1, "bfloat16"), (256, 2, "")]
)
def test_an_export_keeps_within_its_budget(
    tmp_path: Path, source: Path, memory_mib: int, workers: int, dtype: str
) -> None:
    command = [sys.executable, "-c", WORK, source, tmp_path / "out", str(memory_mib * MIB), str(workers), dtype]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    print(found)
    assert found["bytes"] > 2000 * MIB / (2 if dtype else 1)
    assert found["peak"] < memory_mib + EXTRA_MIB, found
    if memory_mib >= 512:
        assert found["read"] < 1.05 * 2048 * MIB, found
