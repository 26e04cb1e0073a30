"""What saving and loading 2 GiB add to a process's memory: windows, not copies of the state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
EXTRA_MIB = 256

WORK = """
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
    state = {str(n): torch.full((1 << 14, 1 << 14), float(n)).t() for n in range(2)}
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


@pytest.mark.parametrize("kind", ["rows", "transposed"])
def test_saving_and_loading_2_gib_adds_little_memory(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", WORK, str(tmp_path), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["bytes"] == 2048 * MIB
    assert found["right"]
    assert found["saved"] < EXTRA_MIB, found
    assert found["loaded"] < EXTRA_MIB, found
