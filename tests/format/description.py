"""What a checkpoint holds as JSON: digests of tensors, values with their types. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import holdfast

FOLDER = Path(__file__).parent / "golden-1"
EXPECTED = FOLDER / "expected.json"
CHECKPOINTS = (
    "run/step-000000000005",
    "run/step-000000000007",
    "sharded",
    "single",
    "split",
    "unhealthy",
    "reusing/step-000000000002",
    "reusing/step-000000000004",
    "reusing/step-000000000006",
    "rewound/step-000000000002",
    "rewound/step-000000000004",
    "rewound/step-000000000006",
)
CODED_FOLDER = Path(__file__).parent / "golden-1.4"
CODED_CHECKPOINTS = ("every-codec", "reusing/step-000000000002", "reusing/step-000000000004", "sharded", "split")
"""Checkpoints with coded pieces."""
TYPES_FOLDER = Path(__file__).parent / "golden-1.5"
TYPES_CHECKPOINTS = ("newer-types",)
"""A checkpoint of the element types that format 1.5 added."""


def described(value: object) -> object:
    """Return a value as JSON that tells types and bits apart."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        return [kind, str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, Mapping):
        return [kind, [[described(key), described(item)] for key, item in value.items()]]
    if isinstance(value, set | frozenset):
        return [kind, sorted((described(item) for item in value), key=repr)]
    if isinstance(value, list | tuple):
        return [kind, [described(item) for item in value]]
    if isinstance(value, float):
        return [kind, value.hex()]
    return [kind, repr(value)]


def digest(array: object) -> str:
    """Return the SHA-256 of an array's row-major bytes."""
    assert isinstance(array, np.ndarray), type(array)
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def description(path: Path) -> dict[str, object]:
    """Return everything that reading a checkpoint tells."""
    checkpoint = holdfast.open_checkpoint(path)
    manifest = checkpoint.manifest
    return {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "aliases": dict(checkpoint.aliases),
        "packs": [pack.name for pack in manifest.packs],
        "tensors": {
            fqn: [info.dtype, list(info.shape), digest(np.asarray(checkpoint.read(fqn)))]
            for fqn, info in checkpoint.tensors.items()
        },
        "pieces": {
            fqn: [[list(piece.region.start), list(piece.region.stop), piece.pack] for piece in checkpoint.pieces(fqn)]
            for fqn in checkpoint.tensors
        },
        "objects": described(checkpoint.objects),
    }
