"""Fingerprints the state of a rank with digests, so that ranks can compare states in 56 bytes at every save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from holdfast.base.geometry.mesh_packing import unpacked
from holdfast.base.geometry.tensor import Mesh, Role
from holdfast.base.name_patterns import unmatched
from holdfast.base.ports.framework import Collected, LocalShard, UnmatchedPattern
from holdfast.base.types.values import Group, Value
from holdfast.core.format.digest import short_digest_of
from holdfast.core.format.index.tensor_table import require_listable
from holdfast.core.format.values import values
from holdfast.core.plan.declared_parts import (
    DeclaredParts,
    DeclaredTensor,
    Sum,
    declared_tensors,
    encode_sum,
    is_declared,
    parts_of,
    sums_of_parts,
)
from holdfast.core.plan.siblings import NO_FAMILY, TensorOnMesh
from holdfast.errors import refusal
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.agreement.records import Details, SiblingMeshes, Statement
from holdfast.training.coordination.job import Job
from holdfast.training.saving.mesh_numbers import MeshNumbers

_STATISTICS_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"})
"""Element types of buffers that differ by rank in ordinary runs: running averages, masks. All others are integers, or
packed and quantised weights."""


_GOLDEN_RATIO = (5**0.5 - 1) / 2


class StateFingerprint:
    """Fingerprint of a layout, and digests of the values that replicas should share."""

    def __init__(self, collected: Collected, job: Job, location: CheckpointLocation, sequence: int = 0) -> None:
        """Sample the tensors and encode the values.

        Args:
            collected: The state of this rank.
            job: The ranks.
            location: Where the checkpoint goes.
            sequence: The number of the save in the job, the same on every rank. It decides which bytes are sampled.
        Raises:
            InvalidError: Values are outside the closed set, or a tensor is too large for an index.
        """
        self._collected, self._location, self._settings = collected, location, job.settings
        self._differing = job.differing
        self._shards = [local.shard for local in collected.shards]
        self._agreeing: dict[str, bytes] = {}
        """Samples of the plain tensors that must agree, and digests of the records of tensor subclasses, by FQN."""
        self._other: dict[str, bytes] = {}
        """Samples of the plain buffers, which may differ, by FQN."""
        self._slots = MeshNumbers(job.comm.rank)
        self._whole_bytes = 0 if sequence else job.settings._tuning.sample_whole_bytes
        self._shift = _shift_of(job.nonce, sequence)
        refused = [*collected.refused]
        tree = values.encode(collected.tree, "", refused)
        per_rank = values.encode(dict(collected.per_rank), "", refused, entries_are_whole=True)
        if refused:
            raise refusal(refused)
        self.tree_bytes = values.dumps(tree)
        """The non-tensor state, encoded."""
        self.per_rank_bytes = values.dumps(per_rank) if per_rank else None
        """Per-rank values of this rank, encoded; None without such values."""
        # Before the samples: this call refuses tensors that no index can list, and some of those cannot be sampled.
        layout = self._layout()
        # A single rank has no other rank to compare samples with.
        if job.comm.world_size > 1:
            self._sample_replicated()
        self._layout_fingerprint = short_digest_of(layout)
        self._meshes = self._slots.stated
        meshes = "".join(stated.digest for stated in self._meshes)
        self.shards = short_digest_of(layout, meshes.encode(), self._local_pieces())
        """Fingerprint of the layout, of its meshes and of the pieces that this rank holds."""
        self._sums = job.part_sums.of(self.shards, self._shards, job.comm.rank)

    def statement(self, step: int, *, overwrites: bool = False) -> Statement:
        """Return the statement of this rank for the save agreement.

        Args:
            step: The step; -1 for a save by path.
            overwrites: Whether the save may replace a checkpoint.
        """
        other, known = self._other_digests()
        return Statement(
            step=step,
            location=self._location.url_digest,
            layout=self._layout_fingerprint,
            agreeing=short_digest_of(*(fqn.encode() + digest for fqn, digest in self._agreeing.items())),
            other=other,
            known=known,
            parts=encode_sum(self._sums.held),
            unmatched=(*self._collected.unmatched, *self._unmatched_settings()),
            meshes=self._meshes,
            overwrites=overwrites,
            is_loaded=self._collected.as_loaded,
            compresses=self._settings.compression != "off",
        )

    def _unmatched_settings(self) -> Iterator[UnmatchedPattern]:
        """Yield the patterns of settings that match no tensor of this rank."""
        if self._settings.compression != "off":
            for pattern in unmatched(self._settings.compression_skip, (shard.tensor.fqn for shard in self._shards)):
                yield UnmatchedPattern("compression_skip", pattern)

    def details(self) -> Details:
        """Return the same facts by name; published only if ranks differ."""
        plain = {
            shard.tensor.fqn: (shard.tensor.dtype, shard.tensor.global_shape, shard.role)
            for shard in self._shards
            if shard.holders is None
        }
        agreeing = {fqn: digest.hex() for fqn, digest in self._agreeing.items()}
        other = {name: digest.hex() for name, digest in self._entries().items()}
        return Details(self._location.url, plain, agreeing, other, self._lossy(), self.declared_tensors())

    def declared_tensors(self) -> Mapping[str, DeclaredTensor]:
        """Return the tensors with parts that this rank declares, by FQN."""
        return declared_tensors(self._shards)

    def whole_sum(self) -> Sum:
        """Return the sum of those tensors as a whole."""
        return self._sums.whole

    def part_sums(self) -> Mapping[str, Sum]:
        """Return the sum of the declared parts of each tensor on this rank, by FQN."""
        return sums_of_parts(self._shards, self._slots.rank)

    def declared_parts(self, fqns: Collection[str]) -> Mapping[str, DeclaredParts]:
        """Return the parts that this rank declares of some tensors, by FQN."""
        return {
            shard.tensor.fqn: parts_of(shard)
            for shard in self._shards
            if is_declared(shard) and shard.tensor.fqn in fqns
        }

    def _lossy(self) -> list[str]:
        """Return the buffers and objects whose value on one rank cannot stand for all ranks.

        The integers of a quantised weight, of a random state and of an object's position are data of one rank. A
        counter, and the values of an accumulator, differ by rank in ordinary runs.
        """
        specs = [shard.tensor for shard in self._shards if shard.holders is None and shard.role is Role.BUFFER]
        names = [spec.fqn for spec in specs if spec.dtype not in _STATISTICS_DTYPES and prod(spec.global_shape) > 1]
        names += [*_objects(self._collected.tree, ""), *self._collected.subclasses]
        accumulators = self._collected.accumulators
        return [name for name in names if not any(name == path or name.startswith(f"{path}.") for path in accumulators)]

    def _other_digests(self) -> tuple[bytes, bytes]:
        """Return the digests of the entries that may differ: of entries without a known difference, and of the rest."""
        known = self._differing.get(self._layout_fingerprint)
        if known is None:
            # Nothing differed so far. The encoded tree exists already; to split the tree would cost time at each save.
            buffers = (fqn.encode() + digest for fqn, digest in self._other.items())
            return short_digest_of(self.tree_bytes, *buffers), short_digest_of()
        entries = sorted(self._entries().items())
        parts: tuple[list[bytes], list[bytes]] = [], []
        for name, digest in entries:
            parts[name in known].append(name.encode("utf-8", "surrogatepass") + digest)
        return short_digest_of(*parts[False]), short_digest_of(*parts[True])

    def _entries(self) -> dict[str, bytes]:
        """Return the digest of each buffer and value that may differ, by name."""
        return self._other | dict(_leaves(self._collected.tree, ""))

    def tensors_on_meshes(self) -> Mapping[str, TensorOnMesh]:
        """Return the DTensors of this rank, by FQN. Published only if ranks have several layouts."""
        return {shard.tensor.fqn: tensor for shard in self._shards if (tensor := self._slots.tensor_of(shard))}

    def sibling_samples(self, siblings: SiblingMeshes, class_number: int) -> Mapping[int, Mapping[str, str]]:
        """Return by family and FQN the digest of samples of each tensor on sibling meshes, hex.

        Only these tensors are sampled: the placements of all others show which ranks hold equal copies.
        """
        samples: dict[int, dict[str, str]] = {number: {} for number in range(len(siblings.families))}
        groups = siblings.replicas.families_of(self._slots.rank, len(siblings.families))
        for local in self._collected.shards:
            family = self._family_of(local, siblings, class_number, groups)
            if family != NO_FAMILY:
                # Replicas must cut a tensor equally, too, since each replica plans the writes of all.
                cut = repr(local.shard.pieces).encode() if local.shard.is_located else b""
                samples[family][local.shard.tensor.fqn] = short_digest_of(self._sample(local), cut).hex()
        return {family: found for family, found in samples.items() if found}

    def sibling_holders(
        self, siblings: SiblingMeshes, class_number: int, *, lowest_only: bool = False
    ) -> Mapping[str, tuple[int, ...]]:
        """Return by FQN the ranks that hold the same part of each tensor on sibling meshes as this rank, ascending.

        Args:
            siblings: The sibling meshes.
            class_number: The class of this rank.
            lowest_only: Whether of each family only the mesh with the lowest rank counts.
        """
        meshes: list[Sequence[Mesh]] = [unpacked(family) for family in siblings.families]
        if lowest_only:
            meshes = [[min(family, key=lambda mesh: min(mesh.ranks))] for family in meshes]
        offset = len(meshes) if lowest_only else 0
        groups = siblings.replicas.families_of(self._slots.rank, len(siblings.families))
        return {
            local.shard.tensor.fqn: self._slots.holders(local.shard, meshes[family], family + offset)
            for local in self._collected.shards
            if (family := self._family_of(local, siblings, class_number, groups)) != NO_FAMILY
        }

    def _family_of(self, local: LocalShard, siblings: SiblingMeshes, class_number: int, groups: Sequence[int]) -> int:
        if local.shard.is_located:
            return groups[siblings.replicas.division_of.get(local.shard.tensor.fqn, 0)] if groups else NO_FAMILY
        slot = self._slots.slot_of(local.shard.layout)
        return NO_FAMILY if slot is None else siblings.family_of(class_number, slot, local.shard.tensor.fqn)

    def _layout(self) -> bytes:
        """Return all inputs of a plan that every rank of a class shares.

        The text contains the slot of a mesh, not the ranks. So ranks on sibling meshes are in one class, for any
        number of siblings.
        """
        settings = self._settings
        lines = [
            repr((settings.chunk_bytes, settings._tuning.pack_header_bytes_max)),
            repr(sorted(self._collected.aliases.items())),
        ]
        # Thousands of tensors share a few layouts. Format each layout once: repr is slow.
        texts: dict[tuple[object, ...], str] = {}
        for shard in self._shards:
            tensor, is_plain = shard.tensor, shard.holders is None
            key = (tensor.dtype, tensor.global_shape, id(shard.layout), id(shard.role), is_plain, shard.is_located)
            text = texts.get(key)
            if text is None:
                require_listable(tensor)
                layout = self._slots.text_of(shard.layout)
                text = repr((tensor.dtype, tensor.global_shape, layout, shard.role, is_plain, shard.is_located))
                texts[key] = text
            lines.append(f"{tensor.fqn}\0{text}")
        # No FQN contains a NUL, so the joined text is unambiguous.
        return "\0".join(lines).encode("utf-8", "surrogatepass")

    def _local_pieces(self) -> bytes:
        """Return the pieces that this rank holds of each sharded tensor."""
        sharded = [shard for shard in self._shards if shard.holders is not None]
        return repr(
            [(shard.holders, [(piece.start, piece.stop) for piece in shard.pieces]) for shard in sharded]
        ).encode()

    def _sample_replicated(self) -> None:
        for local in self._collected.shards:
            if local.shard.holders is None:
                samples = self._other if local.shard.role is Role.BUFFER else self._agreeing
                samples[local.shard.tensor.fqn] = self._sample(local)
        # Inner tensors have no meaning without class and context, and only one rank saves class and context.
        for fqn, record in self._collected.subclasses.items():
            self._agreeing[fqn] = short_digest_of(values.dumps(values.encode(record, fqn)))

    def _sample(self, local: LocalShard) -> bytes:
        tuning = self._settings._tuning
        samples = local.source.sample(
            tuning.sample_blocks, tuning.sample_block_bytes, whole_bytes=self._whole_bytes, shift=self._shift
        )
        return short_digest_of(samples)


def _shift_of(nonce: str, sequence: int) -> float:
    """Return where the samples of a save begin, as `Source.sample` takes it.

    Multiples of the golden ratio, modulo 1, spread evenly: successive saves sample other bytes, at any step numbers.
    The nonce lets a restarted job begin at another place.
    """
    return (int(nonce or "0", 16) / 2**64 + sequence * _GOLDEN_RATIO) % 1.0


def _leaves(value: Value, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the digest of every leaf of a tree."""
    items = value.items if isinstance(value, Group) else value if isinstance(value, dict) else None
    # An object owns its layout, and is saved whole, from one rank.
    is_whole = isinstance(value, Group) and value.kind == "stateful"
    if is_whole or not items or not all(isinstance(key, str) for key in items):
        # Most values are scalars, and one encoder call a scalar is slow.
        is_scalar = type(value) in (int, float, str, bool)
        yield path, short_digest_of(repr(value).encode() if is_scalar else values.dumps(values.encode(value, path)))
        return
    for key, item in items.items():
        yield from _leaves(item, f"{path}.{key}" if path else key)


def _objects(value: Value, path: str) -> Iterator[str]:
    """Yield the path of every object with a `state_dict` in a tree."""
    if isinstance(value, Group):
        if value.kind == "stateful":
            yield path
        elif value.kind == "dict":
            for key, item in value.items.items():
                yield from _objects(item, f"{path}.{key}" if path else key)
