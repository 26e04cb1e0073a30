"""Lightning's Trainer and Fabric save and load through Holdfast, by their own verbs.

Users import it: `Trainer(plugins=[HoldfastCheckpointIO()])`, `Trainer(strategy=HoldfastModelParallelStrategy())`.
Read `checkpoint_io.py` first, then `strategies.py`. It never decides when a checkpoint is saved or removed.
"""

from __future__ import annotations

from holdfast.integrations.lightning.contents import HOST

HOST.require()

# Only now: what these import is Lightning's.
from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO, load_from_checkpoint  # noqa: E402
from holdfast.integrations.lightning.fabric_strategies import HoldfastFabricModelParallelStrategy  # noqa: E402
from holdfast.integrations.lightning.strategies import (  # noqa: E402
    HoldfastFSDPStrategy,
    HoldfastModelParallelStrategy,
)

__all__ = [
    "HoldfastCheckpointIO",
    "HoldfastFSDPStrategy",
    "HoldfastFabricModelParallelStrategy",
    "HoldfastModelParallelStrategy",
    "load_from_checkpoint",
]
