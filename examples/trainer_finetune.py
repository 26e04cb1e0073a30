"""Train a small Llama with Trainer, saved by Holdfast; kill it and start it again.

    pip install 'holdfast[transformers]'
    python examples/trainer_finetune.py out
    torchrun --nproc-per-node 2 examples/trainer_finetune.py out

The second start of a command goes on where the last committed save was. `out/_hf` has a folder for `from_pretrained`
of each kept step.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from holdfast.integrations.transformers import HoldfastMixin

parser = argparse.ArgumentParser()
parser.add_argument("folder", nargs="?", default="out")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=20)
arguments = parser.parse_args()


class MyTrainer(HoldfastMixin, Trainer):
    """Trainer, saved by Holdfast."""


logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("holdfast").setLevel(logging.INFO)
text = torch.tensor(list(Path(__file__).read_bytes()))
examples = [{"input_ids": row, "labels": row} for row in text.unfold(0, 64, 16)]
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
training = TrainingArguments(
    arguments.folder,
    max_steps=arguments.steps,
    save_steps=arguments.every,
    save_total_limit=3,
    logging_steps=10,
    learning_rate=1e-3,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = MyTrainer(model, training, train_dataset=examples, save_hf=True)
was_saved = any(Path(arguments.folder, "_holdfast").glob("step-*/manifest.json"))
trainer.train(resume_from_checkpoint=was_saved)
