"""Train torchtitan's Llama 3 debug model with Holdfast's checkpoints; kill it, start it again, and it goes on.

torchrun --nproc-per-node 2 examples/torchtitan_llama3.py

torchtitan needs GPUs, and the test data and tokenizer of its own checkout. On CPUs, with random words in their place:

torchrun --nproc-per-node 2 -m tests.integrations.torchtitan.on_cpu examples/torchtitan_llama3.py
"""

from __future__ import annotations

import argparse

from torch import distributed
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.logging import init_logger

from holdfast.integrations.torchtitan import HoldfastManager

parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", default="outputs")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--every", type=int, default=5)
arguments = parser.parse_args()

init_logger()
config = config_registry.llama3_debugmodel()
config.dump_folder = arguments.folder
config.training.steps = arguments.steps
config.checkpoint = HoldfastManager.Config(
    enable=True,
    interval=arguments.every,
    keep_latest_k=3,
    last_save_model_only=False,  # So that a longer training can go on from the last step.
)

trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
distributed.destroy_process_group()
