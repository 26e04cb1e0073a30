"""Writes real checkpoints of other systems for the interop bench: `python -m bench.foreign KIND FOLDER` on every rank.

`zero1` and `zero1_tiny` are DeepSpeed's, of 124 million parameters as GPT-2 has them and of 2,000 parameters of 4,096;
`dcp` is a `torch.distributed.checkpoint` of DTensors, and `dcp_hf` the same through its Hugging Face writer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

DCP_MIB = 1024


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the 148 parameters of GPT-2's smallest model."""
    wide, vocabulary, context = 768, 50257, 1024
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocabulary, wide), "wpe": (context, wide)}
    for layer in range(12):
        shapes |= {
            f"h{layer}_ln1_weight": (wide,),
            f"h{layer}_ln1_bias": (wide,),
            f"h{layer}_qkv_weight": (3 * wide, wide),
            f"h{layer}_qkv_bias": (3 * wide,),
            f"h{layer}_out_weight": (wide, wide),
            f"h{layer}_out_bias": (wide,),
            f"h{layer}_ln2_weight": (wide,),
            f"h{layer}_ln2_bias": (wide,),
            f"h{layer}_up_weight": (4 * wide, wide),
            f"h{layer}_up_bias": (4 * wide,),
            f"h{layer}_down_weight": (wide, 4 * wide),
            f"h{layer}_down_bias": (wide,),
        }
    return shapes | {"ln_weight": (wide,), "ln_bias": (wide,)}


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Return 2,000 shapes of 4,096 elements."""
    return {f"p{number}": (64, 64) for number in range(2000)}


SHAPES = {"zero1": gpt2_shapes, "zero1_tiny": tiny_shapes}


class Parameters(torch.nn.Module):
    """Parameters of given shapes, and a loss that gives each of them a gradient."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator) / 50))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return torch.stack([(parameter * scale).square().sum() for parameter in self.parameters()]).sum()


def write_deepspeed(shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Train one step under ZeRO-1 and save."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = Parameters(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(())))
    engine.step()
    engine.save_checkpoint(str(folder))


def write_dcp(folder: Path, *, as_safetensors: bool) -> None:
    """Save sharded tensors, through the file system's writer or the one for Hugging Face."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from bench.state import MIB, sharded_state

    dist.init_process_group("gloo")
    state = sharded_state(init_device_mesh("cpu", (dist.get_world_size(),)), DCP_MIB * MIB, fill=True)
    if as_safetensors:
        writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save(state, checkpoint_id=str(folder))


def main() -> None:
    """Write one checkpoint."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if kind in SHAPES:
        write_deepspeed(SHAPES[kind](), folder)
    else:
        write_dcp(folder, as_safetensors=kind == "dcp_hf")
    dist.barrier()
    # Gloo's threads may abort an interpreter that goes down in order.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
