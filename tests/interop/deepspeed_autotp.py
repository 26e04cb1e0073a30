"""What a rank does of a job that DeepSpeed itself cuts by tensor parallelism. Run by `tests.support.gloo_worlds`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.gloo_worlds import World

WORDS = 64


def train(world: World, *, folder: str, stage: int) -> None:
    """Train a tiny Llama over two tensor-parallel ranks, and save it."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(world.rank)}
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        config=settings,
        model_parameters=model.parameters(),
    )
    for step in range(2):
        words = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(f"{folder}/ckpt")
    dist.barrier()
