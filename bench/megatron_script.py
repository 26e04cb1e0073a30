"""A Megatron checkpoint of 124 M parameters into a Llama of Transformers: through a layout, and by a script.

The script is the one that people write: DCP reads everything, Python cuts, `save_file` writes, `from_pretrained` reads.
Each is a process of its own, on files that the page cache has forgotten; the clock starts after the imports.
"""

from __future__ import annotations

import argparse
import json
import pickle  # noqa: TID251 - torch_dist keeps the arguments of Megatron as a pickle
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.conditions import forget_pages
from bench.part import Round, in_turn

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB = 12, 768, 12, 4, 64, 2048, 32000
CONFIG = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "head_dim": HEAD, "intermediate_size": FFN, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip
QKV = (HEADS + 2 * GROUPS) * HEAD
SHAPES = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "output_layer.weight": (VOCAB, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, QKV, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HEADS * HEAD),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
}


def make(folder: Path) -> None:
    """Write the checkpoint as Megatron-core does: DCP files, and arguments beside them."""
    import torch.distributed.checkpoint as dcp

    state = {name: torch.randn(shape) * 0.02 for name, shape in SHAPES.items()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    arguments = argparse.Namespace(
        num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True, kv_channels=HEAD,
        ffn_hidden_size=FFN, vocab_size=VOCAB, hidden_size=HIDDEN,
    )  # fmt: skip
    torch.save({"args": arguments, "iteration": 1}, folder / "common.pt", pickle_module=pickle)  # noqa: TID251


def digest(model: torch.nn.Module) -> float:
    """Return a number that differs if a tensor does."""
    state = sorted(model.state_dict().items())
    return sum((number % 7 + 1) * float(tensor.double().square().sum()) for number, (_, tensor) in enumerate(state))


def ours(source: Path, _: Path) -> torch.nn.Module:
    """Fill a model through a layout."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    import holdfast

    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    holdfast.load(source, {"model": model}, layout=["megatron-dist", "megatron-hf-llama"])
    return model


def script(source: Path, out: Path) -> torch.nn.Module:
    """Read, cut, write and read again."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    state = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    made = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "lm_head.weight": state["output_layer.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        at, name = f"model.layers.{layer}", "decoder.layers.self_attention"
        fused = state[f"{name}.linear_qkv.weight"][layer].view(GROUPS, -1, HIDDEN)
        per_group = HEADS // GROUPS * HEAD
        cuts = {
            "q": fused[:, :per_group],
            "k": fused[:, per_group : per_group + HEAD],
            "v": fused[:, per_group + HEAD :],
        }
        made |= {f"{at}.self_attn.{key}_proj.weight": cut.reshape(-1, HIDDEN) for key, cut in cuts.items()}
        made[f"{at}.self_attn.o_proj.weight"] = state[f"{name}.linear_proj.weight"][layer]
        made[f"{at}.input_layernorm.weight"] = state[f"{name}.linear_qkv.layer_norm_weight"][layer]
        made[f"{at}.post_attention_layernorm.weight"] = state["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer]
        gate, up = state["decoder.layers.mlp.linear_fc1.weight"][layer].chunk(2)
        made |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        made[f"{at}.mlp.down_proj.weight"] = state["decoder.layers.mlp.linear_fc2.weight"][layer]
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, out / "model.safetensors", {"format": "pt"})
    LlamaConfig(**CONFIG).save_pretrained(out)
    return LlamaForCausalLM.from_pretrained(out)


def measured(folder: Path, rounds: int, python: str) -> list[Round]:
    """Measure both; return the rounds.

    Args:
        folder: For the files.
        rounds: How often.
        python: An interpreter that has Transformers.
    """
    source, out = folder / "iter_0000001", folder / "converted"
    out.mkdir()
    make(source)
    found = []
    for number in range(rounds):
        this: Round = {}
        digests = set()
        for name, _ in in_turn([("ours", None), ("script", None)], number):
            forget_pages(source)
            command = [python, "-m", "bench.megatron_script", name, source, out]
            said = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            this[name] = said["seconds"]
            digests.add(said["digest"])
        assert len(digests) == 1, f"the models differ: {digests}"
        found.append(this)
    return found


def main() -> None:
    """Be one of the two."""
    import torch.distributed.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401 - imports are left out of the time

    import holdfast.api  # noqa: F401

    name, source, out = sys.argv[1:]
    act = {"ours": ours, "script": script}[name]
    start = time.perf_counter()
    model = act(Path(source), Path(out))
    print(json.dumps({"seconds": time.perf_counter() - start, "digest": digest(model)}))


if __name__ == "__main__":
    main()
