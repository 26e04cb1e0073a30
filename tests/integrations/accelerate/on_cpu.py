"""FSDP under Accelerate without a GPU: it shards on GPUs only, and makes DDP of it elsewhere without a word."""

from __future__ import annotations

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def sharding_plugin(*modules: str, version: int = 2) -> FullyShardedDataParallelPlugin:
    """Return what asks for a version of FSDP, one unit for each module of these class names."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(modules),
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def shard(accelerator: accelerate.Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Have every Accelerator of this process shard what it prepares from now on.

    The mode is an entry of its state, and each prepared optimizer sets that back to what the devices allow. So the
    classes answer instead.
    """
    accelerate.Accelerator.distributed_type = property(lambda self: DistributedType.FSDP)
    AcceleratorState.is_fsdp2 = property(lambda self: self.fsdp_plugin.fsdp_version == 2)
    accelerator.state.fsdp_plugin = plugin
