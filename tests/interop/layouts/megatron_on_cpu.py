"""Models of Megatron-core on one CPU. Megatron asks for a GPU by name in a few places; these are answered here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class _NoRandomStates:
    """Stands for the random states of dropout, of which there is none here."""

    def fork(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


@contextlib.contextmanager
def megatron(store: Path) -> Iterator[None]:
    """Set Megatron up on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    try:
        with _OnCpu():
            import megatron.core.tensor_parallel as tensor_parallel
            import megatron.core.tensor_parallel.random as random_states
            import megatron.core.transformer.moe.moe_utils as moe
            from megatron.core import parallel_state

            states = _NoRandomStates()
            random_states.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: states
            if not hasattr(moe, "te_general_gemm"):
                moe.te_general_gemm = None  # The router asks for this name without Transformer Engine too.
            parallel_state.initialize_model_parallel()
            yield
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def gpt(config: Any) -> torch.nn.Module:
    """Return a GPTModel of the shape of a config of Transformers, in evaluation mode.

    Args:
        config: Of Llama, Qwen2, Qwen3 or Mixtral.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = getattr(config, "num_local_experts", None)
    has_head_norms = config.model_type == "qwen3"
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim if has_head_norms else None,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=has_head_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        num_moe_experts=experts,
        moe_router_topk=config.num_experts_per_tok if experts else 2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_ffn_hidden_size=config.intermediate_size if experts else None,
    )
    return GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=has_head_norms, normalization="RMSNorm"
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
    ).eval()


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a GPTModel."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        result = model(tokens, torch.arange(length)[None].expand_as(tokens), mask)
    assert isinstance(result, torch.Tensor)
    return result
