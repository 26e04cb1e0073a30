"""Checkpoints laid out as DeepSpeed lays them out, of any size and with any fault: dicts of plain values, saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
NAN = float("nan")


@dataclass
class Crafted:
    """A checkpoint of ZeRO-1 or 3 in one flat buffer, made of what each tensor-parallel rank holds."""

    held: Sequence[Tensors]
    """By tensor-parallel rank, its parameters."""

    ranks: int = 1
    """Data-parallel ranks."""

    stage: int = 1
    """1 or 3."""

    info: Mapping[str, object] = field(default_factory=dict)
    """`universal_checkpoint_info`."""

    def model_state(self, tp: int) -> dict[str, Any]:
        """Return what a file of model states holds."""
        held = self.held[tp]
        # Parameters are views of their flat buffer.
        views = torch.cat([each.flatten() for each in held.values()]).split([each.numel() for each in held.values()])
        module = {name: view.view(each.shape) for view, (name, each) in zip(views, held.items(), strict=True)}
        if self.stage == 3:
            module = {name: torch.zeros(0) for name in held}
        return {
            "module": module,
            "buffer_names": [],
            "param_shapes": [{name: each.shape for name, each in held.items()}],
            "shared_params": {},
            "global_steps": 7,
            "mp_world_size": len(self.held),
            "ds_version": "0.0.0",
            "universal_checkpoint_info": dict(self.info),
        }

    def optimizer_state(self, tp: int, dp: int) -> dict[str, Any]:
        """Return what one rank's file of optimizer states holds; padding is not a number."""
        held = list(self.held[tp].values())
        group = {"lr": 0.1, "params": [0]}
        if self.stage == 3:
            parts = [cut_of(each, self.ranks, dp) for each in held]
            master = torch.cat(parts) if parts else torch.zeros(0)
            padding = 0
        else:
            flat = torch.cat([each.flatten() for each in held])
            share = -(-len(flat) // (2 * self.ranks)) * 2
            padding = min(max((dp + 1) * share - len(flat), 0), share)
            master = torch.nn.functional.pad(flat, (0, share * self.ranks - len(flat)), value=NAN)
            master = master[dp * share : (dp + 1) * share]
        state = {0: {"step": torch.tensor(7.0), "exp_avg": moment_of(master)}}
        shared = {"zero_stage": self.stage, "partition_count": self.ranks if self.stage == 3 else [self.ranks]}
        kept = master.clone()[: len(master) - padding]
        if self.stage == 3:
            shared |= {"fp32_flat_groups": [kept], "optimizer_state_dict": {"state": state, "param_groups": [group]}}
        else:
            shared |= {"single_partition_of_fp32_groups": [kept], "group_paddings": [padding]}
            shared |= {"base_optimizer_state": {"state": state, "param_groups": [group]}}
        return {"optimizer_state_dict": shared, "ds_version": "0.0.0"}

    def write(self, folder: Path, **faults: Mapping[str, Any]) -> Path:
        """Write it, and return the folder.

        Args:
            folder: Where to.
            faults: By name of a file, without what it ends with, entries to be put into what it holds.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for tp in range(len(self.held)):
            for dp in range(self.ranks):
                optimizer = self.optimizer_state(tp, dp)
                name = f"zero_pp_rank_{dp}_mp_rank_{tp:02d}"
                optimizer["optimizer_state_dict"].update(faults.get(f"{name}_optim", {}))
                save(optimizer, folder / f"{name}_optim_states.pt")
                if self.stage == 3 or dp == 0:
                    name = name if self.stage == 3 else f"mp_rank_{tp:02d}"
                    save({**self.model_state(tp), **faults.get(name, {})}, folder / f"{name}_model_states.pt")
        return folder


def save(value: object, path: Path) -> None:
    """Write a file of `torch.save`."""
    torch.save(value, path)  # noqa: TID251 - makes what DeepSpeed makes


def cut_of(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return one rank's padded share of a parameter, as ZeRO-3 cuts it."""
    flat = whole.flatten()
    share = -(-len(flat) // ranks)
    return torch.nn.functional.pad(flat, (0, share * ranks - len(flat)), value=NAN)[rank * share :][:share]


def moment_of(whole: torch.Tensor) -> torch.Tensor:
    """Return what a crafted optimizer keeps for a master copy."""
    return whole * 2 + 1


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    """Return a tensor of which every element is another."""
    count = int(torch.Size(shape).numel())
    return torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
