"""Simulated jobs: the tensors of large models, and the part of each rank, without any data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.placement import coordinate_of, held_boxes_in_shard_order, replica_ranks
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role, Shard, TensorSpec
from holdfast.base.ports.framework import Collected, LocalShard, Ticket
from holdfast.base.types.values import Group, PerRankRef

Lies = Literal["column", "row", "whole", "expert"]
"""How tensor or expert parallelism cuts a weight: its rows, its columns, not at all, or by experts."""

RNG_STATE = bytes(range(256)) * 20
"""As many bytes as torch keeps of a CPU generator, near enough; every rank has its own."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    lies: Lies


def llama_405b() -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of Llama 3 405B, layer by layer; embedding first, head last."""
    hidden, ffn, kv = 16384, 53248, 8 * 128
    block: tuple[tuple[str, tuple[int, ...], Lies], ...] = (
        ("attention.wq.weight", (hidden, hidden), "column"),
        ("attention.wk.weight", (kv, hidden), "column"),
        ("attention.wv.weight", (kv, hidden), "column"),
        ("attention.wo.weight", (hidden, hidden), "row"),
        ("feed_forward.w1.weight", (ffn, hidden), "column"),
        ("feed_forward.w2.weight", (hidden, ffn), "row"),
        ("feed_forward.w3.weight", (ffn, hidden), "column"),
        ("attention_norm.weight", (hidden,), "whole"),
        ("ffn_norm.weight", (hidden,), "whole"),
    )
    layers = [tuple(Weight(f"layers.{n}.{name}", shape, lies) for name, shape, lies in block) for n in range(126)]
    head = (Weight("norm.weight", (hidden,), "whole"), Weight("output.weight", (128256, hidden), "column"))
    return ((Weight("tok_embeddings.weight", (128256, hidden), "column"),), *layers, head)


def deepseek_671b() -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of a mixture of 256 experts in the shapes of DeepSeek-V3."""
    hidden, experts, ffn = 7168, 256, 2048
    attention: tuple[tuple[str, tuple[int, ...], Lies], ...] = (
        ("attention.wq_a.weight", (1536, hidden), "column"),
        ("attention.wq_b.weight", (24576, 1536), "column"),
        ("attention.wkv_a.weight", (576, hidden), "column"),
        ("attention.wkv_b.weight", (32768, 512), "column"),
        ("attention.wo.weight", (hidden, 16384), "row"),
        ("attention.q_norm.weight", (1536,), "whole"),
        ("attention.kv_norm.weight", (512,), "whole"),
        ("attention_norm.weight", (hidden,), "whole"),
        ("ffn_norm.weight", (hidden,), "whole"),
    )
    dense: tuple[tuple[str, tuple[int, ...], Lies], ...] = (
        ("feed_forward.w1.weight", (18432, hidden), "column"),
        ("feed_forward.w2.weight", (hidden, 18432), "row"),
        ("feed_forward.w3.weight", (18432, hidden), "column"),
    )
    mixture: tuple[tuple[str, tuple[int, ...], Lies], ...] = (
        ("moe.router.gate.weight", (experts, hidden), "whole"),
        ("moe.experts.w1", (experts, ffn, hidden), "expert"),
        ("moe.experts.w2", (experts, hidden, ffn), "expert"),
        ("moe.experts.w3", (experts, ffn, hidden), "expert"),
        ("moe.shared_experts.w1.weight", (ffn, hidden), "column"),
        ("moe.shared_experts.w2.weight", (hidden, ffn), "row"),
        ("moe.shared_experts.w3.weight", (ffn, hidden), "column"),
    )
    layers = [
        tuple(
            Weight(f"layers.{n}.{name}", shape, lies)
            for name, shape, lies in (*attention, *(dense if n < 3 else mixture))
        )
        for n in range(61)
    ]
    head = (Weight("norm.weight", (hidden,), "whole"), Weight("output.weight", (129280, hidden), "column"))
    return ((Weight("tok_embeddings.weight", (129280, hidden), "column"),), *layers, head)


@dataclass(frozen=True)
class SyntheticJob:
    """A model on ranks, numbered by pipeline stage, then data-parallel rank, then tensor- or expert-parallel rank.

    FSDP2 shards everything over the data-parallel ranks of a stage. `tensor` ranks shard what Megatron shards. With
    `expert` over 1, experts are sharded over that many data-parallel ranks, and FSDP shards over the rest.
    """

    name: str
    layers: tuple[tuple[Weight, ...], ...]
    stages: int
    data: int
    tensor: int = 1
    expert: int = 1
    is_mixed: bool = False
    """Whether weights are bf16, with fp32 masters; else they are fp32."""

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that share the layers of one stage."""
        return self.data * self.tensor

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stages * self.ranks_per_stage

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.ranks_per_stage

    @cached_property
    def _tensors(self) -> list[list[tuple[TensorSpec, MeshLayout | None]]]:
        return [list(self._tensors_on(stage)) for stage in range(self.stages)]

    def _tensors_on(self, stage: int) -> Iterator[tuple[TensorSpec, MeshLayout | None]]:
        count = len(self.layers)
        for layer in self.layers[count * stage // self.stages : count * (stage + 1) // self.stages]:
            for weight in layer:
                layout = self._layout(stage, weight.lies)
                dtype = "bfloat16" if self.is_mixed else "float32"
                yield TensorSpec(f"model.{weight.name}", dtype, weight.shape), layout
                if self.is_mixed:
                    yield TensorSpec(f"optimizer.state.{weight.name}.master", "float32", weight.shape), layout
                for moment in ("exp_avg", "exp_avg_sq"):
                    fqn = f"optimizer.state.{weight.name}.{moment}"
                    yield TensorSpec(fqn, "float32", weight.shape), layout
                yield TensorSpec(f"optimizer.state.{weight.name}.step", "float32", ()), None

    @lru_cache  # noqa: B019 - a job lives as long as the bench
    def _layout(self, stage: int, lies: Lies) -> MeshLayout:
        first = stage * self.ranks_per_stage
        ranks = tuple(range(first, first + self.ranks_per_stage))
        if lies == "expert" and self.expert > 1:
            mesh = (self.data // self.expert, self.expert)
            return MeshLayout(mesh, ranks, (Placement(0, self.expert), Placement(0)))
        if self.tensor == 1:
            return MeshLayout((self.data,), ranks, (Placement(0),))
        mesh = (self.data, self.tensor)
        if lies == "column":
            return MeshLayout(mesh, ranks, (Placement(0, self.tensor), Placement(0)))
        return MeshLayout(mesh, ranks, (Placement(0), Placement(1 if lies == "row" else None)))

    def shards_of(self, rank: int) -> list[Shard]:
        """Return the shards of a rank, computed as a framework's adapter does."""
        shards: list[Shard] = []
        coordinates: dict[MeshLayout, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for tensor, layout in self._tensors[self.stage_of(rank)]:
            if layout is None:
                shards.append(Shard(tensor, None, None, Role.OPTIMIZER, (Box.whole(()),)))
                continue
            if layout not in coordinates:
                at = coordinate_of(layout, rank)
                coordinates[layout] = at, replica_ranks(layout, at)
            at, holders = coordinates[layout]
            boxes = held_boxes_in_shard_order(layout, tensor.global_shape, at)
            shards.append(Shard(tensor, layout, holders, Role.PARAMETER, tuple(box for box, _ in boxes)))
        return shards

    def collected_on(self, rank: int) -> Collected:
        """Return the collected state of a rank."""
        stage = self.stage_of(rank)
        parameters = [t.fqn.removeprefix("model.") for t, _ in self._tensors[stage] if t.fqn.startswith("model.")]
        hyperparameters: Mapping[str, object] = {
            "g": {"lr": 8e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "fused": True}
        }
        optimizer: dict[str, object] = {
            "hyperparameters": hyperparameters,
            "param_groups": dict.fromkeys(parameters, "g"),
            "state": {},
        }
        tree: dict[str, object] = {
            "model": Group("module", {}),
            "optimizer": Group("optimizer", optimizer),
            "step": 1000,
        }
        tree["rng"] = PerRankRef("rng")
        shards = [LocalShard(shard, _Scalar()) for shard in self.shards_of(rank)]
        return Collected(shards, Group("dict", tree), {}, (), {"rng": RNG_STATE + rank.to_bytes(8, "little")})


class _Scalar:
    """The bytes of a step counter, the only kind of tensor whose bytes are read before it is written."""

    def sample(self, blocks: int, block_bytes: int, *, whole_bytes: int, shift: float) -> bytes:
        return b"\0\0\x7aD"

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        raise AssertionError("nothing is written of a job on paper")


def dense(ranks: int) -> SyntheticJob:
    """Return Llama 3 405B on TP8 × PP16 × DP(rest)."""
    return SyntheticJob(f"405B TP8 PP16 DP{ranks // 128}", llama_405b(), 16, ranks // 128, 8)


def mixture(ranks: int) -> SyntheticJob:
    """Return a mixture of experts on PP16 × DP(rest), experts over 64 of the data-parallel ranks."""
    return SyntheticJob(f"671B MoE PP16 DP{ranks // 16} EP64", deepseek_671b(), 16, ranks // 16, expert=64)


def targets(ranks: int) -> tuple[SyntheticJob, SyntheticJob]:
    """Return two other layouts of the dense model on as many ranks: TP4 × PP8, and FSDP alone."""
    return (
        SyntheticJob(f"TP4 PP8 DP{ranks // 32}", llama_405b(), 8, ranks // 32, 4),
        SyntheticJob(f"FSDP {ranks}", llama_405b(), 1, ranks),
    )
