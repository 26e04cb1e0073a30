"""Fill a Transformers model straight from a checkpoint of Megatron-core, and keep it as Hugging Face files.

    python examples/megatron_to_hf.py MEGATRON/iter_0000100 CONFIG_FOLDER OUT
    torchrun --nproc-per-node 2 examples/megatron_to_hf.py …    # each rank reads its rows alone (FSDP2)

MEGATRON/iter_0000100 is a `torch_dist` folder of any tensor, pipeline and expert parallelism. CONFIG_FOLDER has the
`config.json` of the model in Transformers. Nothing is converted first, and no second copy is made.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import holdfast

LAYOUTS = {"mixtral": ["megatron-dist", "megatron-hf-mixtral", "hf-mixtral"]}
LLAMA_LIKE = ["megatron-dist", "megatron-hf-llama"]


def main() -> None:
    """Load the model, export the files, and show a logit."""
    source, config_folder, out = sys.argv[1:]
    config = AutoConfig.from_pretrained(config_folder)
    model = AutoModelForCausalLM.from_config(config)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model)
    layout = LAYOUTS.get(config.model_type, LLAMA_LIKE)
    report = holdfast.load(source, {"model": model}, layout=layout)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{report.tensors} tensors, {report.bytes} bytes read in {report.seconds:.2f} s")
        # The files of Hugging Face come from the checkpoint too: no rank holds the whole model.
        holdfast.export(source, out, to="safetensors", layout=layout[:2])
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        with torch.no_grad():
            print("logits", model(torch.arange(8)[None]).logits.abs().max().item())


if __name__ == "__main__":
    main()
