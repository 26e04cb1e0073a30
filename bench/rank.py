"""One rank of one part: `python -m bench.rank PART FOLDER PARAMS`, as `bench.job` starts it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from bench import device, job
from bench.parts import PARTS, PEERS_PARTS, SHELF_PARTS, STORE_PARTS, TIER_PARTS


def main() -> None:
    """Measure; rank 0 writes the result as JSON."""
    name, folder, params = sys.argv[1:]
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    device.choose()
    is_job = int(os.environ["WORLD_SIZE"]) > 1
    if is_job:
        dist.init_process_group("gloo")
    parts = {**PARTS, **STORE_PARTS, **TIER_PARTS, **SHELF_PARTS, **PEERS_PARTS}
    if name not in parts:
        # Imported for these parts alone: the parts use modules of the package that an older checkout lacks.
        from bench.activations.parts import ACTIVATION_PARTS
        from bench.compression_parts import COMPRESSION_PARTS
        from bench.data.parts import DATA_PARTS
        from bench.differential_parts import DIFFERENTIAL_PARTS

        parts = {**ACTIVATION_PARTS, **COMPRESSION_PARTS, **DATA_PARTS, **DIFFERENTIAL_PARTS}
    part = parts[name]
    measured = part.measure(Path(folder) / "work", json.loads(params))
    measured.notes.extend(device.notes())
    if not is_job or dist.get_rank() == 0:
        (Path(folder) / job.RESULT).write_text(json.dumps(dataclasses.asdict(measured)))
    if is_job:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
