"""One checkpoint, read-only and lazy: what is in it, and any part of it."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

from holdfast.checkpoint.coverage import require_covered
from holdfast.checkpoint.index_loading import index_for, listing_at, split_index_at
from holdfast.checkpoint.location import CheckpointLocation, manifest_bytes_at
from holdfast.checkpoint.per_rank import per_rank_values
from holdfast.checkpoint.tensor_reader import TensorReader
from holdfast.checkpoint.verify_foreign import ListedVerification
from holdfast.clock import Clock, SystemClock
from holdfast.engine.buffers import allocate_aligned
from holdfast.engine.read import execute
from holdfast.engine.target import HostTarget
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.format.index.foreign_index import index_foreign
from holdfast.format.index.index import Index
from holdfast.format.index.split_index import SplitIndex
from holdfast.format.manifest import decode_manifest
from holdfast.format.names import is_file_url, is_pack_name, rank_of_pack, step_of_pack
from holdfast.format.values import values
from holdfast.geometry.box import Box
from holdfast.geometry.mesh import described_mesh
from holdfast.plan.forecast import Forecast, forecast
from holdfast.plan.reads import WantedBoxes, load_plan
from holdfast.ports.observer import Observer
from holdfast.ports.store import Packs
from holdfast.repository.catalog import check_pack, read_file, read_index, stored_bytes
from holdfast.repository.verify import Damage, Verification
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.types.manifest import FileRecord, Manifest
from holdfast.types.plan import LoadPlan, Piece
from holdfast.types.values import Group, Value

Selector = int | slice | EllipsisType
ToFramework = Callable[[object, str], object]
"""Turns a numpy array and the name of its true dtype into a framework's tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says of one tensor."""

    dtype: str
    """Element type by name, e.g. `bfloat16`."""

    shape: tuple[int, ...]
    """Global shape, elements."""

    bytes: int
    """Size of the whole tensor."""


class Checkpoint:
    """A committed checkpoint. Opening it reads the manifest; of the index is read what is needed, when it is."""

    def __init__(
        self, location: CheckpointLocation, settings: Settings, to_torch: ToFramework, *, clock: Clock | None = None
    ) -> None:
        self._place, self._settings, self._to_torch = location, settings, to_torch
        self._clock = clock or SystemClock()
        self._pack_bytes: dict[str, int] = {}
        self._split: SplitIndex | None = None
        self._partly_bytes = 0
        self._listing = listing_at(location)
        if self._listing is None:
            self.manifest: Manifest = decode_manifest(manifest_bytes_at(location), f"{location.url}/manifest.json")
            """The commit record; of another system's checkpoint, what it would be."""
        else:
            self.manifest, index = index_foreign(self._listing, location.url)
            require_covered(index, self._clock, location.url)
            self.__dict__["index"] = index

    @property
    def url(self) -> str:
        """Where it lies."""
        return self._place.url

    @property
    def step(self) -> int | None:
        """Its step; None if it was saved by path."""
        return self.manifest.step

    @property
    def origin(self) -> str | None:
        """What wrote it, or what it was imported from, with a version where it says one; None for Holdfast."""
        return self.manifest.origin

    @property
    def references(self) -> tuple[str, ...]:
        """URLs of files elsewhere that it references, as an import without `copy` leaves them."""
        return tuple(pack.name for pack in self.manifest.packs if is_file_url(pack.name))

    @property
    def packs_of_other_steps(self) -> Mapping[int, tuple[FileRecord, ...]]:
        """By step, ascending, the packs of other steps of its run in which tensors lie that had not changed since."""
        found: dict[int, tuple[FileRecord, ...]] = {}
        for pack in self.manifest.packs:
            step = step_of_pack(pack.name)
            if step is not None:
                found[step] = (*found.get(step, ()), pack)
        return dict(sorted(found.items()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was left out or ignored of another system's checkpoint, and why."""
        return () if self._listing is None else tuple(self._listing.remarks)

    @cached_property
    def packs(self) -> Packs:
        """Where its packs lie, by name."""
        return self._place.packs_of(self.manifest)

    @cached_property
    def index(self) -> Index:
        """Tensors and pieces."""
        index = read_index(self._place.store, self._place.folder, self.manifest)
        require_covered(index, self._clock, self.url)
        return index

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype, shape and bytes of every stored tensor, by FQN."""
        return {
            fqn: TensorInfo(spec.dtype, spec.global_shape, spec.global_bytes)
            for fqn, spec in sorted(self.index.tensors.items())
        }

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to stored FQN. `read` takes either."""
        return self.manifest.aliases

    @cached_property
    def objects(self) -> dict[str, object]:
        """The values that are not tensors, nested as they were saved; hyperparameters by parameter FQN."""
        return {key: _shown(value, key) for key, value in self.manifest.tree.items.items()}

    def objects_document(self) -> object:
        """Return `objects` as a JSON document, tagged as docs/values.md says."""
        return values.encode(self.objects, "")

    def read(self, fqn: str, index: Selector | tuple[Selector, ...] | None = None, framework: str = "numpy") -> object:
        """Return a tensor or a part of it, checked against its digests.

        Args:
            fqn: Its name, or one it is tied under.
            index: Integers and slices as for a numpy array (no masks, no negative steps); only the chunks
                they meet are read. None: everything.
            framework: `numpy` or `torch`. In numpy, bfloat16 and float8 come as unsigned integers of their width;
                `tensors[fqn].dtype` tells the true dtype.
        Returns:
            An array or tensor of the indexed shape, in host memory.
        Raises:
            MissingError: No such tensor.
            InvalidError: The index does not fit the tensor, or the framework is unknown.
            CorruptError: Stored bytes are not what was saved.
        """
        if framework not in ("numpy", "torch"):
            raise InvalidError(f"framework={framework!r}; expected 'numpy' or 'torch'")
        stored = self.aliases.get(fqn, fqn)
        tensors = self._at_hand().tensors
        spec = tensors.get(stored)
        if spec is None:
            near = [name for name in tensors if name.endswith(fqn.rpartition(".")[2])][:5]
            raise MissingError(f"{self.url}: no tensor {fqn!r}; names that end alike: {near}. See .tensors")
        box, rest = _box_of(index, spec.global_shape, fqn)
        plan = load_plan(
            [WantedBoxes(stored, (box,))], self._index_of(stored, box).pieces_near, self._settings.read_window_bytes
        )
        self._require_there(plan)
        target = HostTarget(spec.dtype, box)
        execute(plan, self.packs, [target], self._settings)
        # The Ellipsis keeps what has no dimension left an array; numpy would make a scalar of it.
        array = target.array[(*rest, ...)]
        return array if framework == "numpy" else self._to_torch(array, spec.dtype)

    @property
    def source(self) -> TensorReader:
        """What windows of its tensors are read from."""
        return TensorReader(self.index.pieces_near, self.packs, self._settings)

    def _at_hand(self) -> Index | SplitIndex:
        """Return the index, or as much of one in several files as was read; of that at least every tensor."""
        overview = self.manifest.overview
        if overview is None or "index" in self.__dict__:
            return self.index
        if self._split is None:
            data = read_file(self._place.store, self._place.folder, self.manifest.attempt, overview)
            self._split = split_index_at(self._place, self.manifest, data)
        return self._split

    def _index_of(self, fqn: str, box: Box) -> Index:
        """Return an index that lists all pieces of a box, proven to hold it exactly once."""
        found = self._at_hand()
        if isinstance(found, SplitIndex) and self.manifest.overview is not None:
            self._partly_bytes += self.manifest.overview.bytes + found.bytes_for([(fqn, box)])
            if self._partly_bytes > sum(record.bytes for record in self.manifest.indexes):
                # Whoever reads on and on pays for the whole at most twice.
                found, self._split = self.index, None
        return index_for(found, [(fqn, box)], self._clock, self._place)

    def _require_there(self, plan: LoadPlan) -> None:
        """Refuse to read past the end of a pack, before memory is allocated for it.

        Raises:
            CorruptError: A pack ends too early, or one that lies elsewhere is not as long as it was.
        """
        if self._listing is not None:
            return  # Held against the sizes of the files as it was listed.
        records = {pack.name: pack for pack in self.manifest.packs}
        for run in plan.runs:
            stored, known = self.packs(run.pack), self._pack_bytes.get(run.pack)
            if known is None:
                known = self._pack_bytes[run.pack] = stored_bytes(stored.files, stored.key)
            if run.stop > known or (not is_pack_name(run.pack) and known != records[run.pack].bytes):
                check_pack(stored, records[run.pack], self.step)

    @property
    def settings(self) -> Settings:
        """How it is read."""
        return self._settings

    @cached_property
    def identity(self) -> str:
        """What is another text for any other content: the digest of the manifest, or what the files look like and where
        in them the pieces lie.
        """
        if self._listing is None or self._place.foreign is None:
            return self.manifest.digest
        found = hashlib.sha256(repr([self.url, self._place.foreign.stamps(self._listing.files)]).encode())
        for fqn in sorted(self._listing.pieces):
            # One by one: there may be a million.
            found.update(repr((fqn, *self._listing.pieces[fqn])).encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def require_unchanged(self) -> None:
        """Refuse another system's files that were written again since this was opened; ours never are.

        Raises:
            ConflictError: One was; the message names it.
            MissingError: One is no longer there.
        """
        if self._listing is not None and self._place.foreign is not None:
            self._place.foreign.require_unchanged(self._listing.files)

    def reads_for(self, wanted: Sequence[WantedBoxes], run_bytes_max: int) -> LoadPlan:
        """Return what must be read to fill boxes of stored tensors, known to be there."""
        plan = load_plan(wanted, self.index.pieces_near, run_bytes_max)
        self._require_there(plan)
        return plan

    def per_rank(self, rank: int) -> Mapping[str, object]:
        """Return what one of the ranks that saved kept as its own (`PerRank`, `RngState`), by path.

        Raises:
            MissingError: Fewer ranks saved it.
        """
        return per_rank_values(self._place.store, self._place.folder, self.manifest, rank)

    def pieces(self, fqn: str) -> list[Piece]:
        """Return the stored pieces of a tensor: which box lies in which pack, and so which rank wrote it."""
        return list(self.index.pieces_of(self.aliases.get(fqn, fqn)))

    def written_by(self, fqn: str) -> Mapping[int, int]:
        """Return how many pieces of a tensor each rank wrote; ranks that wrote none are left out, and so are files of
        another system, of which no rank is known.
        """
        packs = (piece.pack for piece in self.pieces(fqn))
        return Counter(rank_of_pack(each) for each in packs if is_pack_name(each) or step_of_pack(each) is not None)

    def plan_for(self, mesh: str, fqns: Iterable[str] | None = None) -> Forecast:
        """Return what each rank of a job would read of this checkpoint; reads nothing but the index.

        Args:
            mesh: The job, e.g. `dp=2,fsdp=4`; docs/cli.md tells the language.
            fqns: What it loads, by stored name; None: every tensor.
        Raises:
            InvalidError: The mesh is not described as it should be.
            MissingError: No such tensor.
        """
        described = described_mesh(mesh)
        stored = self.index.tensors
        names = sorted(stored) if fqns is None else list(fqns)
        absent = [fqn for fqn in names if fqn not in stored]
        if absent:
            raise MissingError(f"{self.url}: no tensor {absent[0]!r}. See .tensors")
        return forecast(
            described, [stored[fqn] for fqn in names], self.index.pieces_near, self._settings.read_window_bytes
        )

    def verification(
        self, observer: Observer | None = None, *, deep: bool = False
    ) -> Verification | ListedVerification:
        """Return the work of reading everything back; of another system's checkpoint, what it holds twice."""
        if self._listing is not None and self._place.foreign is not None:
            files = self._place.foreign.files
            return ListedVerification(self._listing, self.index, files, self._settings, observer, deep=deep)
        try:
            chunk_bytes = self.index.chunk_bytes
        except CheckpointError:
            chunk_bytes = 0  # The damage is what verification is about to report.
        buffer = allocate_aligned(max(self._settings.window_bytes * 2, chunk_bytes) + 2 * PAGE_BYTES)
        return Verification(
            self._place.store,
            self._place.folder,
            self.manifest,
            self.packs,
            buffer,
            lambda index: require_covered(index, self._clock, self.url),
            observer,
        )

    def verify(self, observer: Observer | None = None, *, deep: bool = False) -> Iterator[Damage]:
        """Yield everything that is not as it was saved; nothing for a whole checkpoint.

        Another system's checkpoint carries no digests: its sizes and structure are checked, and what it holds twice is
        compared, copies bit for bit, casts of master copies in samples, or wholly if `deep`.

        Args:
            observer: Told of progress.
            deep: Compare casts wholly.
        """
        yield from self.verification(observer, deep=deep).damages()


def _box_of(
    index: Selector | tuple[Selector, ...] | None, shape: tuple[int, ...], fqn: str
) -> tuple[Box, tuple[Selector, ...]]:
    """Return the smallest box an index needs, and what is left to do to the box."""
    selectors = () if index is None else index if isinstance(index, tuple) else (index,)
    dots = [at for at, each in enumerate(selectors) if each is Ellipsis]
    if len(dots) > 1:
        raise InvalidError(f"{fqn}: an index may hold one Ellipsis, not {len(dots)}")
    for at in dots:
        middle = (slice(None),) * (len(shape) - len(selectors) + 1)
        selectors = (*selectors[:at], *middle, *selectors[at + 1 :])
    if len(selectors) > len(shape):
        raise InvalidError(f"{fqn}: index of {len(selectors)} dimensions; the tensor has {len(shape)}")
    start, stop = [], []
    rest: list[Selector] = []
    for length, each in zip(shape, (*selectors, *(slice(None),) * (len(shape) - len(selectors))), strict=True):
        first, last, left = _run_of(each, length, fqn)
        start.append(first)
        stop.append(last)
        rest.append(left)
    return Box(tuple(start), tuple(stop)), tuple(rest)


def _run_of(selector: object, length: int, fqn: str) -> tuple[int, int, int | slice]:
    """Return the half-open run of a dimension that a selector needs, and what is left to do to the run."""
    try:
        if isinstance(selector, slice):
            first, last, stride = selector.indices(length)
            if stride < 1:
                raise InvalidError(f"{fqn}: slice step {stride}; expected a positive step")
            return first, max(last, first), slice(None, None, stride)
        if isinstance(selector, bool):
            raise TypeError("a bool is a mask")
        asked = operator.index(selector)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidError(f"{fqn}: index {selector!r:.80}; expected integers and slices ({error})") from error
    at = asked + length if asked < 0 else asked
    if not 0 <= at < length:
        raise InvalidError(f"{fqn}: index {asked} of a dimension of length {length}")
    return at, at + 1, 0


def _shown(value: Value, path: str) -> object:
    """Return a node as plain nested dicts.

    Raises:
        CorruptError: It is not what its kind says.
    """
    if not isinstance(value, Group):
        return value
    if value.kind == "stateful":
        return _shown(value.items.get("state"), path)
    if value.kind == "optimizer":
        tables = value.items.get("hyperparameters")
        members = value.items.get("param_groups")
        if not isinstance(tables, dict) or not isinstance(members, dict):
            raise CorruptError(f"{path}: an optimizer without hyperparameters or param_groups. Read another copy")
        if not all(isinstance(key, str) for key in members.values()):
            raise CorruptError(f"{path}.param_groups: expected keys of hyperparameters. Read another copy")
        groups = {name: tables.get(key) for name, key in members.items()}
        return {"param_groups": groups, "state": value.items.get("state", {})}
    return {key: _shown(each, f"{path}.{key}") for key, each in value.items.items()}
