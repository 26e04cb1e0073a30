"""Finds the tensors of a state that changed otherwise than by a step of their optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.backends.torch.local_shards import local_of
from holdfast.backends.torch.redo.gap import GapError
from holdfast.backends.torch.redo.stepped import HeldTensor, Marks, Stepped
from holdfast.backends.torch.redo.sums import SLICES, slices_of
from holdfast.base.ports.framework import LocalShard

_COMPARED_BYTES_MAX = 1 << 20
"""Tensors below this size are compared by their bytes: running statistics, for one, move no version counter."""

_SAMPLED_BLOCKS, _BLOCK_BYTES = 64, 64
"""Larger ones are compared by a sample too: an average that is written through `.data` moves no version counter."""

_STATISTICS = (".running_mean", ".running_var")
"""Buffers of batch norms, which are compared by their bytes at any size."""


class OtherTensors:
    """The tensors that no optimizer steps."""

    def __init__(self, shards: Mapping[str, LocalShard]) -> None:
        self._seen = {fqn: _look(local) for fqn, local in shards.items()}

    def changed(self, shards: Mapping[str, LocalShard]) -> list[LocalShard]:
        """Return the shards that differ from those seen last, and see them.

        Raises:
            GapError: There are other names than before.
        """
        if shards.keys() != self._seen.keys():
            (fqn, *_) = shards.keys() ^ self._seen.keys()
            raise GapError(f"{fqn}: is a tensor that appeared or went")
        now = {fqn: _look(local) for fqn, local in shards.items()}
        before, self._seen = self._seen, now
        return [local for fqn, local in shards.items() if now[fqn] != before[fqn]]


def _look(local: LocalShard) -> object:
    """Return a value that differs once a tensor has changed."""
    shard, source = local.shard, local.source
    spec = (shard.tensor.dtype, shard.tensor.global_shape)
    if shard.bytes < _COMPARED_BYTES_MAX or shard.tensor.fqn.endswith(_STATISTICS):
        return spec, bytes(source.sample(1, shard.bytes, whole_bytes=shard.bytes, shift=0.0))
    return spec, source.stamp(), bytes(source.sample(_SAMPLED_BLOCKS, _BLOCK_BYTES, whole_bytes=0, shift=0.5))


class SteppedTensors:
    """The parameters of one optimizer and their state: seen after each step, compared before the next one."""

    def __init__(self, stepped: Stepped) -> None:
        self._stepped = stepped
        self._seen: Marks = ()
        self.named: dict[str, HeldTensor] = {}
        """The tensors by FQN, in the order of the marks."""
        self._identities: list[int] = []
        self._forms: dict[str, object] = {}
        """Dtype, shape and device by FQN."""
        self._slices: list[list[str]] = []
        self._of_base: set[str] = set()
        """FQNs at the boundary before."""

    def begin(self) -> None:
        """Note which tensors there are at a boundary."""
        self._of_base = {*self.named}

    def see(self) -> None:
        """Take the tensors as they are: a step has ended."""
        self._seen = self._stepped.marks()
        if self._seen[0] != self._identities:
            self._name()

    def changed(self) -> list[HeldTensor]:
        """Return the tensors that changed since they were seen last, and see them.

        Raises:
            GapError: A tensor appeared, went, or has another form: a redo could not fill it.
        """
        marks = self._stepped.marks()
        if marks == self._seen:
            return []
        before, forms = dict(zip(self.named, zip(*self._seen, strict=True), strict=True)), self._forms
        self._seen = marks
        self._name()
        if forms != self._forms:
            fqn = next(fqn for fqn in {**forms, **self._forms} if forms.get(fqn) != self._forms.get(fqn))
            raise GapError(f"{fqn}: appeared, went, or has another dtype, shape or device, outside of a step")
        now = zip(self.named, zip(*marks, strict=True), strict=True)
        found = [fqn for fqn, mark in now if mark != before[fqn]]
        if new := [fqn for fqn in found if fqn not in self._of_base]:
            raise GapError(f"{new[0]}: changed outside of a step since its first step, before a boundary")
        return [self.named[fqn] for fqn in found]

    def due(self, turn: int) -> list[str]:
        """Return the FQNs whose sums are due at a boundary with this number."""
        return self._slices[turn % SLICES]

    def _name(self) -> None:
        self.named = {named[0]: named for named in self._stepped.named()}
        self._identities = [id(tensor) for _, tensor, _ in self.named.values()]
        self._slices = slices_of({fqn: local_of(each).nbytes for fqn, each, _ in self.named.values()})
        self._forms = {fqn: (each.dtype, each.shape, each.device) for fqn, each, _ in self.named.values()}
