"""`examples/megatron_to_hf.py` fills models of Transformers from real checkpoints of Megatron-core."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[3]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "megatron_layouts"


@pytest.mark.parametrize("case", ["dense_tp2_pp2", "moe_ep2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_writes_the_files_of_hugging_face(case: str, ranks: int, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(FIXTURES / case / "hf" / "config.json", config)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    source = FIXTURES / case / "torch_dist" / "iter_0000100"
    command = [
        sys.executable,
        *torchrun,
        REPOSITORY / "examples" / "megatron_to_hf.py",
        source,
        config,
        tmp_path / "out",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "tensors" in ended.stdout
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found, expected = load_file(file), load_file(FIXTURES / case / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
