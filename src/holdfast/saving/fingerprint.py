"""What a rank is about to save, as digests: small enough to state at every save, exact enough to compare."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.agreement import Details, Statement
from holdfast.coordination.job import Job
from holdfast.format.digest import short_digest_of
from holdfast.format.index.tensor_table import require_listable
from holdfast.format.values import values
from holdfast.geometry.tensor import Role
from holdfast.ports.framework import Collected, LocalShard
from holdfast.types.values import Group, Value


class StateFingerprint:
    """Fingerprint of a layout and digests of what replicas should share."""

    def __init__(self, collected: Collected, job: Job, location: CheckpointLocation) -> None:
        """Take samples and encode the values.

        Raises:
            InvalidError: A value is outside the closed set, or a tensor is larger than an index can say.
        """
        self._collected, self._location, self._settings = collected, location, job.settings
        self.tree_bytes = values.dumps(values.encode(collected.tree, ""))
        """The non-tensor state, encoded."""
        own = dict(collected.per_rank)
        self.per_rank_bytes = values.dumps(values.encode(own, "")) if own else None
        """What this rank keeps as its own, encoded; None if nothing."""
        # First, for what no index may list cannot always be sampled.
        layout = self._layout()
        # Alone there is nobody to compare with.
        self._samples = dict(self._sampled()) if job.comm.world_size > 1 else {}
        self._layout_fingerprint = short_digest_of(layout)
        self.shards = short_digest_of(layout, self._held())
        """Fingerprint of the layout and of what this rank holds of it."""

    def statement(self, step: int) -> Statement:
        """Return what this rank states at the opening."""
        agreeing = [fqn.encode() + digest for fqn, (role, digest) in self._samples.items() if role is not Role.BUFFER]
        other = [fqn.encode() + digest for fqn, (role, digest) in self._samples.items() if role is Role.BUFFER]
        return Statement(
            step=step,
            location=short_digest_of(self._location.url.encode()),
            layout=self._layout_fingerprint,
            agreeing=short_digest_of(*agreeing),
            other=short_digest_of(self.tree_bytes, *other),
        )

    def details(self) -> Details:
        """Return the same by name, for when ranks differ."""
        plain = {
            shard.tensor.fqn: (shard.tensor.dtype, shard.tensor.global_shape, shard.role)
            for shard in (each.shard for each in self._collected.shards)
            if shard.holders is None
        }
        agreeing = {fqn: digest.hex() for fqn, (role, digest) in self._samples.items() if role is not Role.BUFFER}
        other = {fqn: digest.hex() for fqn, (role, digest) in self._samples.items() if role is Role.BUFFER}
        other |= {path: short_digest_of(data).hex() for path, data in _leaves(self._collected.tree, "")}
        return Details(self._location.url, plain, agreeing, other)

    def _layout(self) -> bytes:
        """Return everything that a plan depends on, the same on every rank of a class."""
        settings = self._settings
        lines = [
            repr((settings.chunk_bytes, settings._tuning.pack_header_bytes_max)),
            repr(sorted(self._collected.aliases.items())),
        ]
        # Thousands of tensors lie in a few ways, of which each is written once.
        written: dict[tuple[object, ...], str] = {}
        for shard in (each.shard for each in self._collected.shards):
            tensor, is_plain = shard.tensor, shard.holders is None
            way = (tensor.dtype, tensor.global_shape, id(shard.layout), id(shard.role), is_plain)
            lies = written.get(way)
            if lies is None:
                require_listable(tensor)
                lies = repr((tensor.dtype, tensor.global_shape, repr(shard.layout), shard.role, is_plain))
                written[way] = lies
            lines.append(f"{tensor.fqn}\0{lies}")
        # No name holds a NUL, so that none can pass for two.
        return "\0".join(lines).encode("utf-8", "surrogatepass")

    def _held(self) -> bytes:
        """Return what this rank holds of each tensor, where that is not all of it."""
        shards = (each.shard for each in self._collected.shards)
        return repr(
            [
                (shard.holders, [(piece.start, piece.stop) for piece in shard.pieces])
                for shard in shards
                if shard.holders is not None
            ]
        ).encode()

    def _sampled(self) -> Iterator[tuple[str, tuple[Role, bytes]]]:
        for each in self._collected.shards:
            if each.shard.holders is None:
                yield each.shard.tensor.fqn, (each.shard.role, self._sample(each))

    def _sample(self, each: LocalShard) -> bytes:
        tuning = self._settings._tuning
        return short_digest_of(each.source.sample(tuning.sample_blocks, tuning.sample_block_bytes))


def _leaves(value: Value, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the leaves of a tree by path, each encoded."""
    items = value.items if isinstance(value, Group) else value if isinstance(value, dict) else None
    if items is None or not all(isinstance(key, str) for key in items):
        yield path, values.dumps(values.encode(value, path))
        return
    for key, each in items.items():
        yield from _leaves(each, f"{path}.{key}" if path else key)
