"""Trainer under FSDP2 on CPUs: what stands in for the GPU that its `Accelerator` looks for, and the training."""

from __future__ import annotations

from functools import cache
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from tests.integrations.run import Run
from tests.integrations.transformers import training

OPTIONS = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


@cache
def stand_in() -> None:
    """Let an `Accelerator` shard on CPUs: without a GPU it forgets the plugin that it is given, and runs DDP."""
    plain = Accelerator.__init__

    def init(accelerator: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        plain(accelerator, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        accelerator.state.fsdp_plugin = fsdp_plugin

    Accelerator.__init__ = init
    Accelerator.distributed_type = property(lambda accelerator: DistributedType.FSDP)
    Accelerator.is_fsdp2 = AcceleratorState.is_fsdp2 = property(lambda state: True)


def train(run: Run) -> None:
    stand_in()
    training.train(run, **OPTIONS)
