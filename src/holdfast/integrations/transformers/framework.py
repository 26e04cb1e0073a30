"""The tested versions of Transformers, what Trainer can do that is not covered, and agreement between its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.errors import InvalidError
from holdfast.integrations.host import Host, from_first

HOST = Host(
    integration="transformers",
    package="transformers",
    extra="transformers",
    tested_from=(5, 23, 0),
    tested_to=(5, 24, 0),
    model_key="model",
)

_Result = TypeVar("_Result")


def require_covered(trainer: Any) -> None:
    """Refuse a trainer whose state or files Holdfast would not keep.

    Raises:
        InvalidError: Names the option, and what to do.
    """
    arguments = trainer.args
    if trainer.is_deepspeed_enabled:
        raise InvalidError(
            "TrainingArguments.deepspeed: a DeepSpeed engine keeps its own state, which is not saved; expected DDP, "
            "FSDP2 or one process. Use Trainer without HoldfastMixin"
        )
    if arguments.save_on_each_node:
        raise InvalidError(
            "TrainingArguments.save_on_each_node=True: every node would have a part of each step; expected storage "
            "that all nodes share. Set it to False"
        )
    strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
    if arguments.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise InvalidError(
            f"TrainingArguments.hub_strategy={strategy!r}: a step of Holdfast is not pushed; expected 'every_save' or "
            "'end', which push the model. Copy a run elsewhere with holdfast cp"
        )


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of the job."""
    return not _has_ranks() or dist.get_rank() == 0


def rank_count() -> int:
    """Return how many ranks the job has."""
    return dist.get_world_size() if _has_ranks() else 1


def on_first_rank(call: Callable[[], _Result]) -> _Result:
    """Return on every rank what a call returns on rank 0, or raise there what it raises. Every rank calls.

    Raises:
        CheckpointError: The call raised it, or with several ranks another error, which it names.
    """
    return from_first(call, is_first=is_first_rank(), broadcast=_broadcast) if _has_ranks() else call()


def _broadcast(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
