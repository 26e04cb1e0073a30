"""One checkpoint, read-only and lazy: its content, and any part of a tensor."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

from holdfast.base.clock import SystemClock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.mesh import described_mesh
from holdfast.base.layouts.layout import Layout, views_of
from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.framework import Target
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Packs
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.export import ExportContent
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import LoadPlan, Piece, WantedBoxes
from holdfast.base.types.values import PIECES_RECORD, Group
from holdfast.core.engine.read import execute
from holdfast.core.engine.target import HostTarget
from holdfast.core.format.index.foreign_index import index_foreign
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.manifest import decode_manifest
from holdfast.core.format.names import is_file_url, is_pack_name, rank_of_pack, step_of_pack
from holdfast.core.format.state_order import names_of, paths_of
from holdfast.core.format.values import values
from holdfast.core.plan.forecast import Forecast, forecast
from holdfast.core.plan.reads import load_plan
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, first_three
from holdfast.settings import Settings
from holdfast.stored.checkpoint.codings import StoredForm, codings_in, stored_form
from holdfast.stored.checkpoint.coverage import require_covered
from holdfast.stored.checkpoint.index_loading import index_for, manifest_or_listing, split_index_at
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_in_place_of
from holdfast.stored.checkpoint.pack_sizes import check_pack, sizes_of
from holdfast.stored.checkpoint.plain_values import to_plain
from holdfast.stored.checkpoint.same_content import same_content
from holdfast.stored.checkpoint.selectors import Selector, box_of
from holdfast.stored.checkpoint.tensor_info import TensorInfo
from holdfast.stored.checkpoint.tensor_reader import TensorReader
from holdfast.stored.checkpoint.verify import Damage, Verification
from holdfast.stored.checkpoint.verify_foreign import ListedVerification
from holdfast.stored.checkpoint.viewed import Viewed
from holdfast.stored.checkpoint.viewed_values import viewed_values
from holdfast.stored.repository.catalog import read_file, read_index, read_per_rank
from holdfast.stored.repository.logs import RunLog, log_after

_Result = TypeVar("_Result")
ToFramework = Callable[[object, str], object]
"""Converts a numpy array to a framework's tensor of the named dtype."""


class Checkpoint:
    """A committed checkpoint. Opening it reads the manifest. Later calls read the parts of the index that they need."""

    def __init__(
        self,
        location: CheckpointLocation,
        settings: Settings,
        to_torch: ToFramework,
        *,
        codecs: Codecs = NO_CODECS,
        layouts: Sequence[Layout] = (),
    ) -> None:
        self.layouts = tuple(layouts)
        """Layouts that make its tensors; empty: they are those that are stored."""
        self.codecs = codecs
        """What decodes coded chunks."""
        self._location, self._settings, self._to_torch, self._clock = location, settings, to_torch, SystemClock()
        self._pack_bytes: dict[str, int] = {}
        self._split: SplitIndex | None = None
        self._split_read_bytes = 0
        self._was_read = False
        content = manifest_or_listing(location)
        self._listing = None if isinstance(content, bytes) else content
        if isinstance(content, bytes):
            self.manifest: Manifest = decode_manifest(content, f"{location.url}/manifest.json")
            """The commit record; for another system's checkpoint, one made from the listing."""
        else:
            self.manifest, index = index_foreign(content, location.url)
            require_covered(index, self._clock, location.url)
            self.__dict__["index"] = index

    @property
    def url(self) -> str:
        """Where it is stored."""
        return self._location.url

    @property
    def settings(self) -> Settings:
        """How its bytes are read."""
        return self._settings

    @property
    def step(self) -> int | None:
        """Its step; None if it was saved by path."""
        return self.manifest.step

    @property
    def origin(self) -> str | None:
        """The system that wrote it or its source, with a version if known; None for Holdfast."""
        return self.manifest.origin

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names: alias to a name of `tensors`. `read` takes either."""
        return self.viewed.aliases if self.layouts else self.manifest.aliases

    @property
    def references(self) -> tuple[str, ...]:
        """URLs of the files that it references, after an import without `copy`."""
        return tuple(pack.name for pack in self.manifest.packs if is_file_url(pack.name))

    @property
    def packs_of_other_steps(self) -> Mapping[int, tuple[FileRecord, ...]]:
        """Packs of other steps of its run that hold its unchanged tensors: by step, ascending."""
        packs: dict[int, list[FileRecord]] = {}
        for pack in self.manifest.packs:
            step = step_of_pack(pack.name)
            if step is not None:
                packs.setdefault(step, []).append(pack)
        return {step: tuple(packs[step]) for step in sorted(packs)}

    @cached_property
    def log(self) -> RunLog | None:
        """The redo log after this base; None if this is no base, or if a newer timeline superseded the base."""
        root = self._location.root
        return None if root is None else log_after(root, self.manifest)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Parts of another system's checkpoint that were left out or ignored, each with the reason."""
        return () if self._listing is None else tuple(self._listing.remarks)

    @cached_property
    def codings(self) -> Mapping[int, tuple[KindCoding, ...]]:
        """By rank, how the save stored each kind of tensors and why, as reports beside the checkpoint say."""
        return codings_in(self._location, self.manifest)

    @cached_property
    def packs(self) -> Packs:
        """Locates its packs by name."""
        return self._location.packs_of(self.manifest)

    @cached_property
    def index(self) -> Index:
        """Tensors and pieces."""
        index = read_index(self._location.store, self._location.folder, self.manifest)
        require_covered(index, self._clock, self.url)
        return index

    @cached_property
    def viewed(self) -> Viewed:
        """What its layouts make of the stored tensors.

        Raises:
            InvalidError: A layout does not fit.
        """
        stored, manifest = self.index.tensors, self.manifest
        values = {key: to_plain(value, key) for key, value in manifest.tree.items.items()} if self.layouts else {}
        views = views_of(self.layouts, stored, manifest.aliases, values, self._location.document)
        same = partial(same_content, self.index, self.packs, self.settings, self.codecs)
        return Viewed.of(views, stored, manifest.aliases).with_equal_counts(same, self.url)

    @property
    def content(self) -> ExportContent:
        """Its tensors, tied names and values, and their order in the state."""
        tensors, manifest = self.viewed.tensors, self.manifest
        if self.layouts:
            return ExportContent(tensors, self.aliases, self._tree, tuple(tensors))
        order = names_of(manifest.order, tensors, chain(manifest.aliases, paths_of(manifest.tree)), self.url)
        return ExportContent(tensors, manifest.aliases, manifest.tree, order)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype, shape and bytes of every stored tensor, by FQN."""
        return {
            fqn: TensorInfo(spec.dtype, spec.global_shape, spec.global_bytes)
            for fqn, spec in sorted(self.viewed.tensors.items())
        }

    @cached_property
    def objects(self) -> dict[str, object]:
        """The values that are not tensors, nested as they were saved; hyperparameters by parameter FQN."""
        items = self._tree.items
        return {key: to_plain(value, key) for key, value in items.items() if key != PIECES_RECORD}

    @property
    def _tree(self) -> Group:
        return viewed_values(self.manifest.tree, self.viewed.views) if self.layouts else self.manifest.tree

    def objects_document(self) -> object:
        """Return `objects` as a JSON document with the tags of docs/values.md."""
        return values.encode(self.objects, "")

    def read(self, fqn: str, index: Selector | tuple[Selector, ...] | None = None, framework: str = "numpy") -> object:
        """Return a tensor or a part of it, checked against its digests.

        Args:
            fqn: Its name, or a tied name.
            index: Integers and slices as for a numpy array (no masks, no negative steps); only chunks that
                overlap it are read. None: everything.
            framework: `numpy` or `torch`. In numpy, bfloat16 and float8 become unsigned integers of their width;
                `tensors[fqn].dtype` is the stored dtype.
        Returns:
            An array or tensor of the indexed shape, in host memory.
        Raises:
            MissingError: No such tensor.
            InvalidError: The index does not fit the tensor, or the framework is unknown.
            CorruptError: Stored bytes differ from what was saved.
            ConflictError: The checkpoint was overwritten, and something of the old one was read before.
        """
        require_framework(framework)
        return self._of_one_manifest(lambda: self._read(fqn, index, framework))

    def _read(self, fqn: str, index: Selector | tuple[Selector, ...] | None, framework: str) -> object:
        stored = self.aliases.get(fqn, fqn)
        tensors = self.viewed.tensors if self.layouts else self._loaded_index().tensors
        spec = tensors.get(stored)
        if spec is None:
            similar = [name for name in tensors if name.endswith(fqn.rpartition(".")[2])]
            hint = f"names with the same ending: {first_three(similar)}" if similar else "no name ends like it"
            raise MissingError(f"{self.url}: no tensor {fqn!r}; {hint}. See .tensors")
        box, rest = box_of(index, spec.global_shape, fqn)
        near, bytes_max = self._index_of(stored, box).pieces_near, self.settings._tuning.read_window_bytes
        target = HostTarget(spec.dtype, box)
        plan, targets = self.reads_for([(stored, box, target)], bytes_max, near)
        execute(plan, self.packs, targets, self.settings, self.codecs)
        # The Ellipsis keeps a 0-d result an array; numpy would return a scalar.
        array = target.array[(*rest, ...)]
        return self.as_framework(array, spec.dtype, framework)

    def read_all(self, fqns: Iterable[str], framework: str = "numpy") -> dict[str, object]:
        """Return whole tensors by stored FQN; all of them are read together. Otherwise as `read`.

        Args:
            fqns: Stored names; a name may come twice.
            framework: `numpy` or `torch`.
        Raises:
            CorruptError: Stored bytes differ from what was saved.
            ConflictError: The checkpoint was overwritten after it was opened.
            UnavailableError: Storage failed, or the tensors do not fit into memory.
        """
        require_framework(framework)
        self._was_read = True  # The names are of this manifest.
        return self._of_one_manifest(lambda: self._read_all(fqns, framework))

    def _read_all(self, fqns: Iterable[str], framework: str) -> dict[str, object]:
        specs = {fqn: self.viewed.tensors[fqn] for fqn in fqns}
        made = {fqn: HostTarget(spec.dtype, Box.whole(spec.global_shape)) for fqn, spec in specs.items()}
        wanted = [(fqn, Box.whole(spec.global_shape), made[fqn]) for fqn, spec in specs.items()]
        plan, targets = self.reads_for(wanted, self.settings._tuning.read_window_bytes)
        execute(plan, self.packs, targets, self.settings, self.codecs)
        return {fqn: self.as_framework(target.array, target.dtype, framework) for fqn, target in made.items()}

    @property
    def is_overwritten(self) -> bool:
        """Whether another checkpoint was saved in its place since it was opened."""
        return manifest_in_place_of(self.manifest, self._location) is not None

    @contextmanager
    def blaming_overwrite(self) -> Iterator[None]:
        """Have a block that misses files say so if the checkpoint was overwritten meanwhile: it is not damaged.

        Raises:
            ConflictError: It was overwritten.
        """
        try:
            yield
        except CorruptError as error:
            if not self.is_overwritten:
                raise
            raise ConflictError(
                f"{self.url}: was overwritten while it was read, and files of the old one are removed; expected the "
                "same checkpoint to the end. Run the same again"
            ) from error

    def _of_one_manifest(self, read: Callable[[], _Result]) -> _Result:
        """Return what is read; from the new checkpoint if this one was overwritten and nothing of it was read before.

        Raises:
            ConflictError: It was overwritten, and the caller has something of the old one.
        """
        while True:
            try:
                result = read()
            except CorruptError as error:
                current = manifest_in_place_of(self.manifest, self._location)
                if current is None:
                    raise
                if self._was_read or not self.__dict__.keys().isdisjoint({"tensors", "objects"}):
                    raise ConflictError(
                        f"{self.url}: was overwritten after it was opened, and files of the old one are removed; what "
                        "was read so far is of the old one. Open it again, and read all of it anew"
                    ) from error
                self.manifest, self._split, self._pack_bytes = current, None, {}
                for cached in ("index", "packs", "viewed", "_pack_records"):
                    self.__dict__.pop(cached, None)
            else:
                self._was_read = True
                return result

    def as_framework(self, array: object, dtype: str, framework: str) -> object:
        """Return a numpy array of the bits of a stored dtype, or a tensor of the framework that shares its memory."""
        return array if framework == "numpy" else self._to_torch(array, dtype)

    @property
    def source(self) -> TensorReader:
        """Reads windows of its tensors."""
        return TensorReader(self.index.pieces_near, self.packs, self.settings, self.codecs, self._stored)

    def _loaded_index(self) -> Index | SplitIndex:
        """Return the index; of an index in several files, the overview, which lists every tensor."""
        overview = self.manifest.overview
        if overview is None or "index" in self.__dict__:
            return self.index
        if self._split is None:
            data = read_file(self._location.store, self._location.folder, self.manifest.attempt, overview)
            self._split = split_index_at(self._location, self.manifest, data)
        return self._split

    def _index_of(self, fqn: str, box: Box) -> Index:
        """Return an index that lists all pieces of a box, proven to cover it exactly once."""
        if self.layouts:
            return self.index
        loaded = self._loaded_index()
        if isinstance(loaded, SplitIndex) and self.manifest.overview is not None:
            self._split_read_bytes += self.manifest.overview.bytes + loaded.bytes_for([(fqn, box)])
            if self._split_read_bytes > sum(record.bytes for record in self.manifest.indexes):
                # After many reads, load the whole index: all reads together then cost at most twice its bytes.
                loaded, self._split = self.index, None
        return index_for(loaded, [(fqn, box)], self._clock, self._location)

    def _require_stored(self, plan: LoadPlan) -> None:
        """Refuse to read past the end of a pack, before memory is allocated for it.

        Raises:
            CorruptError: A pack is too short, or the length of a referenced file or another step's pack has changed.
        """
        if self._listing is not None:
            return  # The listing was checked against the sizes of the files.
        runs = [part for run in plan.runs for part in (run, *run.bases)]
        self._pack_bytes |= sizes_of({run.pack for run in runs} - self._pack_bytes.keys(), self.packs)
        for run in runs:
            known, record = self._pack_bytes[run.pack], self._pack_records[run.pack]
            if run.stop > known or (not is_pack_name(run.pack) and known != record.bytes):
                check_pack(self.packs(run.pack), record, self.step)

    @cached_property
    def _pack_records(self) -> Mapping[str, FileRecord]:
        return {pack.name: pack for pack in self.manifest.packs}

    @cached_property
    def identity(self) -> str:
        """A string that changes with the content.

        It is the manifest digest, or for a foreign checkpoint a hash of file stamps and piece offsets.
        """
        layouts = "".join(f" {each} {self.viewed.views[n].sizes}" for n, each in enumerate(self.layouts))
        if self._listing is None or self._location.foreign is None:
            return self.manifest.digest + layouts
        digest = hashlib.sha256(repr([self.url, self._location.foreign.stamps(self._listing.files)]).encode())
        for fqn in sorted(self._listing.pieces):
            # Tensor by tensor: a million of them would make one text too large.
            digest.update(repr((fqn, *self._listing.pieces[fqn])).encode("utf-8", "surrogatepass"))
        return digest.hexdigest() + layouts

    def require_unchanged(self) -> None:
        """Refuse another system's files that were rewritten since this was opened. Holdfast never rewrites its files.

        Raises:
            ConflictError: Names a rewritten file.
            MissingError: A file is gone.
        """
        if self._listing is not None and self._location.foreign is not None:
            self._location.foreign.require_unchanged(self._listing.files)

    def reads_for(
        self,
        wanted: Sequence[tuple[str, Box, Target]],
        run_bytes_max: int,
        pieces_near: Callable[[str, Box], Sequence[Piece]] | None = None,
    ) -> tuple[LoadPlan, list[Target]]:
        """Return the reads that fill boxes of tensors, and their targets, after checking that packs are long enough.

        Args:
            wanted: Names of `viewed.tensors`, boxes, and where each goes.
            run_bytes_max: As for `load_plan`.
            pieces_near: Lists pieces of stored tensors; None: the index does.
        Raises:
            CorruptError: A pack is too short.
        """
        parts = [part for fqn, box, target in wanted for part in self._stored(fqn, box, target)]
        boxes = [WantedBoxes(fqn, (box,)) for fqn, box, _ in parts]
        plan = load_plan(boxes, pieces_near or self.index.pieces_near, run_bytes_max)
        self._require_stored(plan)
        return plan, [target for _, _, target in parts]

    def _stored(self, fqn: str, box: Box, target: Target) -> Iterable[tuple[str, Box, Target]]:
        return self.viewed.stored(fqn, box, target) if self.layouts else [(fqn, box, target)]

    def per_rank(self, rank: int) -> Mapping[str, object]:
        """Return the per-rank values (`PerRank`, `RngState`) of one of the ranks that saved, by path.

        Raises:
            MissingError: Fewer ranks saved it.
        """
        return read_per_rank(self._location.store, self._location.folder, self.manifest, rank)

    def pieces(self, fqn: str) -> list[Piece]:
        """Return the stored pieces of a tensor: the box and the pack of each. The pack's name includes its rank.

        Under a layout, they are those of the tensors that it is made of.
        """
        name = self.aliases.get(fqn, fqn)
        names = self.viewed.sources(name) if self.layouts else (name,)
        return [piece for source in names for piece in self.index.pieces_of(source)]

    def whole_pieces(self, fqn: str) -> Sequence[Piece]:
        """Return pieces that cover a tensor: the stored ones, or one without digests for a tensor that a layout makes.

        Args:
            fqn: A name in `viewed.tensors`.
        """
        stored = self.viewed.renamed(fqn)
        if stored is not None:
            return self.index.pieces_of(stored)
        spec = self.viewed.tensors[fqn]
        return [Piece(spec, Box.whole(spec.global_shape), "", 0, b"", self.index.chunk_bytes)]

    def stored_form(self, fqn: str) -> StoredForm:
        """Return the bytes that a tensor takes in the packs, and its chunks by codec."""
        return stored_form(self.pieces(fqn))

    def written_by(self, fqn: str) -> Mapping[int, int]:
        """Return how many pieces of a tensor each rank wrote, without ranks that wrote none.

        Pieces in another system's files do not count: their rank is unknown.
        """
        packs = (piece.pack for piece in self.pieces(fqn))
        return Counter(rank_of_pack(pack) for pack in packs if is_pack_name(pack) or step_of_pack(pack) is not None)

    def plan_for(self, mesh: str, fqns: Iterable[str] | None = None) -> Forecast:
        """Return what each rank of a job would read of this checkpoint; reads only the index.

        Args:
            mesh: The job's mesh, e.g. `dp=2,fsdp=4`; docs/cli.md defines the syntax.
            fqns: Stored names of the tensors to load; None: every tensor.
        Raises:
            InvalidError: The mesh does not follow the syntax.
            MissingError: No such tensor.
        """
        described = described_mesh(mesh)
        stored = self.index.tensors
        names = sorted(stored) if fqns is None else list(fqns)
        absent = [fqn for fqn in names if fqn not in stored]
        if absent:
            raise MissingError(f"{self.url}: no tensor {absent[0]!r}. See .tensors")
        return forecast(
            described, [stored[fqn] for fqn in names], self.index.pieces_near, self.settings._tuning.read_window_bytes
        )

    def verification(
        self, observer: Observer | None = None, *, deep: bool = False
    ) -> Verification | ListedVerification:
        """Return a verification that reads everything back; for another system's, see `verify`."""
        if self._listing is not None and self._location.foreign is not None:
            files = self._location.foreign.files
            return ListedVerification(self._listing, self.index, files, self.settings, observer, deep=deep)
        return Verification(self._location, self.manifest, self.settings, self._clock, self.codecs, observer)

    def verify(self, observer: Observer | None = None, *, deep: bool = False) -> Iterator[Damage]:
        """Yield every damage; nothing if all bytes are as they were saved.

        Another system's checkpoint has no digests. Its sizes, structure and own checksums are checked, and bytes that
        it stores twice are compared: copies bit for bit, casts of master copies in samples, or all of them if `deep`.

        Args:
            observer: Receives progress.
            deep: Compare casts completely.
        """
        yield from self.verification(observer, deep=deep).damages()


def require_framework(framework: object) -> None:
    """Refuse the name of a framework that tensors cannot be read for.

    Raises:
        InvalidError: It is neither `numpy` nor `torch`.
    """
    if framework not in ("numpy", "torch"):
        raise InvalidError(f"framework={framework!r}; expected 'numpy' or 'torch'")
