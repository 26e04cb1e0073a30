"""Fills a state: what it wants of a checkpoint, and how its values are set once its tensors are filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain

import torch

from holdfast.backends.torch.containers import put_together, tensors_in
from holdfast.backends.torch.local_shards import DENSE, Ranks, is_meta, memory_bytes
from holdfast.backends.torch.optimizers.custom_state import custom_state, has_own_state_dict, is_sharded, may_step
from holdfast.backends.torch.optimizers.numbered import by_name, numbered
from holdfast.backends.torch.optimizers.restore import OptimizerRestoration
from holdfast.backends.torch.optimizers.state import OptimizerView, give_hyperparameters
from holdfast.backends.torch.private_layout import forget_unreduced
from holdfast.backends.torch.state import gradients
from holdfast.backends.torch.state.metrics import require_kept
from holdfast.backends.torch.state.module_extra_entries import load_extra_entries, own_loading
from holdfast.backends.torch.state.naming import is_extra_state
from holdfast.backends.torch.state.overlaps import require_equal_overlaps
from holdfast.backends.torch.state.positions_of_data import require_named_ranks
from holdfast.backends.torch.state.rank_values import load_into, loader_of_rank_value, require_dict
from holdfast.backends.torch.state.resized import ResizedTensors, clipped
from holdfast.backends.torch.state.saved_values import children_of, lost_optimizers, misfit_of_tensor, misfit_of_value
from holdfast.backends.torch.state.selection import ABSENT, EntryMerge, Selector, saved_names
from holdfast.backends.torch.state.walk import (
    DictNode,
    ModuleNode,
    Node,
    Stateful,
    StatefulNode,
    TensorNode,
    ValueNode,
    walk,
)
from holdfast.backends.torch.subclasses.fill import SubclassFilling
from holdfast.backends.torch.subclasses.flatten import is_subclass
from holdfast.backends.torch.tensors import (
    TorchTarget,
    dtype_name,
    global_shape_of,
    held_storable,
    require_not_expanded,
    storable_dtype,
    torch_dtype,
    zeros,
)
from holdfast.backends.torch.ties import Ties, storage_key
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.name_patterns import with_names_above
from holdfast.base.ports.framework import Catalog, Misfit, Selection, Wanted
from holdfast.base.types.per_rank import PerRank, RngState
from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef, Value, is_subclass_record
from holdfast.errors import InvalidError


class TorchRestoration:
    """One load into a state.

    Making it compares the state with the checkpoint and changes nothing. `finish` sets values after the tensors are
    filled.
    """

    def __init__(self, state: Mapping[str, object], catalog: Catalog, selection: Selection, ranks: Ranks) -> None:
        self._catalog, self._selection, self._ranks = catalog, selection, ranks
        self._selector = Selector(selection)
        self.wanted: list[Wanted] = []
        self.held: dict[str, int] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.skipped: list[str] = []
        self._is_strided = False
        """Whether a tensor has gaps between its elements, or several parts."""
        self.misfits: list[Misfit] = []
        self._used: set[str] = set()
        self._resized = ResizedTensors(selection.partial)
        self.partly = self._resized.partly
        self._stored_names: dict[str, str] = {}
        """Name in the checkpoint of each tensor asked for, by its name in the state."""
        self._ties = Ties()
        self._lacked: dict[int, str] = {}
        """First name of each tensor that the checkpoint lacks, by the tensor's identity."""
        self._stored: dict[int, torch.Tensor] = {}
        """Tensors that the checkpoint has, by identity."""
        self._without: list[tuple[str, torch.Tensor]] = []
        """Every name that the checkpoint lacks, with its tensor."""
        self._gradients: dict[int, torch.Tensor] = {}
        self._new: dict[str, torch.Tensor] = {}
        """Tensors allocated here, by stored name."""
        self._finishes: list[Callable[[], object]] = []
        root = walk(state, ranks.rank_of_global)
        require_named_ranks(root)
        self._dict(root, catalog.tree)
        if catalog.drops_ties:
            self._forgive_ties()
        self._find_unexpected_tensors(state)
        tree = (name for key, value in catalog.tree.items.items() for name in saved_names(value, key))
        self.unmatched = self._selector.unmatched(chain(catalog.tensors, catalog.aliases, tree), self._stored_names)
        self.misfits += self._resized.misfits(catalog.same_content)
        if self._is_strided or not self._ties.are_apart(self.held):
            require_equal_overlaps(self.wanted, catalog.fill)
        self.fills_any = bool(self.wanted or self._finishes)

    @cached_property
    def _subclasses(self) -> SubclassFilling:
        # Made when first needed: it refers to this object, which would then keep the state until a garbage collection.
        return SubclassFilling(self, self._catalog, self._ranks, self._finishes)

    def finish(self) -> None:
        """Set values, once every tensor is filled."""
        for finish in self._finishes:
            finish()

    def want(
        self, fqn: str, tensor: torch.Tensor, declared: Sharded | None = None, *, parameter: Sequence[str] = ()
    ) -> bool:
        """Ask for a tensor to be filled; return whether the checkpoint has it.

        Args:
            fqn: Its name.
            tensor: The tensor.
            declared: Its declared layout, if any.
            parameter: Names of the parameter whose state it is.
        Raises:
            InvalidError: The tensor cannot be filled, or would be filled twice with different content.
        """
        if not (self._selector.takes_all or self.takes_part(fqn)):
            return True
        if type(tensor) not in DENSE and is_subclass(tensor):
            return self._subclasses.want(fqn, tensor, declared)
        stored = self._catalog.stored_fqn(fqn)
        spec = self._catalog.tensors.get(stored)
        if spec is None:
            self._without.append((fqn, tensor))
            if id(tensor) not in self._stored and self._lacked.setdefault(id(tensor), fqn) == fqn:
                self.held[fqn] = memory_bytes(tensor, declared, fqn)
            return False
        masters = self._catalog.masters
        master = self._catalog.tensors.get(masters.get(stored, "")) if masters else None
        if master is not None and spec.dtype != master.dtype == dtype_name(tensor.dtype):
            self._used.add(stored)
            stored, spec = master.fqn, master
        advice = "materialise it first, e.g. model.to_empty(device=…)"
        held, memory = held_storable(fqn, tensor, declared, self._ranks, advice)
        if fqn in self._stored_names:
            raise InvalidError(f"{fqn}: two leaves of the state have this name; expected different names. Rename a key")
        self._stored_names[fqn] = stored
        strided = [part.local for part in held.parts if not part.local.is_contiguous()]
        self._is_strided |= bool(strided) or len(held.parts) != 1
        for local in strided:
            require_not_expanded(local, fqn, "the target is")
        overlap = None
        if held.global_shape != spec.global_shape:
            overlap = self._resized.overlap((fqn, *parameter), tensor, held.global_shape, stored, spec.global_shape)
            if overlap is None:
                return True
        self._stored[id(tensor)] = tensor
        if id(tensor) in self._lacked:
            # The checkpoint has this tensor under a tied name, so nothing is missing.
            self.held.pop(self._lacked[id(tensor)], None)
        first = self._ties.first_name(fqn, tensor, held, memory)
        if first == fqn:
            target = TorchTarget(held, spec.dtype)
            self.held[fqn] = target.local_bytes
            dtype = storable_dtype(tensor, fqn)
            boxes = target.boxes if overlap is None else clipped(target.boxes, overlap)
            self.wanted.append(Wanted(stored, boxes, dtype, held.global_shape, target, fqn))
        elif stored != self._stored_names[first] and not self._catalog.same_content(stored, self._stored_names[first]):
            raise InvalidError(
                f"{fqn}: shares its memory with {first}, but the checkpoint holds different values for the two; untie "
                "them, or leave one out with skip="
            )
        return True

    def take(self, reference: TensorRef, template: object) -> torch.Tensor:
        """Return the tensor to fill for a reference in a container: the template if its shape fits, else a new one."""
        stored = self._catalog.stored_fqn(reference.fqn)
        spec = self._catalog.tensors.get(stored)
        if spec is None:
            raise InvalidError(
                f"{reference.fqn}: the checkpoint has the container of this tensor, but not the tensor; leave the "
                "container out with skip="
            )
        if isinstance(template, torch.Tensor) and not self.takes_part(reference.fqn):
            return template
        fits = isinstance(template, torch.Tensor) and global_shape_of(template, reference.fqn) == spec.global_shape
        if isinstance(template, torch.Tensor) and not fits and self._resized.chooses(reference.fqn):
            text = (
                f"{reference.fqn}: {tuple(template.shape)} here and {spec.global_shape} in the checkpoint, inside one "
                "value, where partial cannot fill"
            )
            self.misfits.append(Misfit(text, is_certain=True, fqn=reference.fqn, is_shape=True))
            self._stored_names[reference.fqn] = stored
            return template
        if isinstance(template, torch.Tensor) and fits and not is_meta(template):
            tensor = template
        elif stored in self._new:
            tensor = self._new[stored]  # Tied when it was saved, so tied again.
        else:
            self._catalog.require_stored(stored)
            tensor = self._new[stored] = zeros(spec.global_shape, spec.dtype)
        self.want(reference.fqn, tensor)
        return tensor

    def take_subclass(self, record: FrameworkValue, current: Mapping[str, object]) -> torch.Tensor:
        """Return the tensor to fill for the record of a tensor subclass in a container: the one that is there now."""
        return self._subclasses.take(record, current)

    def pass_over(self, fqn: str) -> None:
        """Record that a stored tensor is not needed: the tensor that it is tied to is filled."""
        self._used.add(self._catalog.stored_fqn(fqn))

    def takes_part(self, name: str) -> bool:
        """Return whether `only` and `skip` select a name; record it as skipped if not."""
        if self._selector.selects(name):
            return True
        self.skipped.append(name)
        self._used.add(self._catalog.stored_fqn(name))
        return False

    def _takes_part_whole(self, path: str) -> bool:
        if self._selector.selects_whole(path):
            return True
        self.skipped.append(path)
        return False

    def _dict(self, node: DictNode, saved: Value) -> None:
        items = children_of(saved)
        for key, child in node.children.items():
            self._node(node, key, child, items.get(key, ABSENT))
        if node.path:
            for key, value in items.items():
                path = f"{node.path}.{key}"
                if key in node.children or isinstance(value, Skipped):
                    continue
                if self._selector.selects_any(path, value):
                    self.unexpected.append(path)

    def _node(self, parent: DictNode, key: str, node: Node, saved: Value) -> None:
        if not self._selector.takes_all:
            self._selector.know(node.path)
        match node:
            case TensorNode():  # First, since most are.
                if not self.want(node.path, node.tensor, node.declared):
                    self._miss(node.path, misfit_of_tensor(node.path, saved))
                if self._selection.grads:
                    self._gradient(node.path, node.tensor, node.declared)
            case DictNode():
                self._dict(node, saved)
                if node.sequence is not None:
                    self._give_items(parent, key, node, node.sequence)
            case ModuleNode():
                self._module(node, saved)
            case OptimizerView():
                self._optimizer(node, saved)
            case StatefulNode():
                self._stateful(node.path, node.stateful, saved, node.stateful.state_dict)
            case ValueNode():
                self._value(parent, key, node, saved)

    def _give_items(
        self, parent: DictNode, key: str, node: DictNode, sequence: list[object] | tuple[object, ...]
    ) -> None:
        """Have a list take the plain values loaded beside its objects, or its parent a tuple of them."""
        objects = ModuleNode | OptimizerView | StatefulNode | TensorNode
        if all(isinstance(child, objects) for child in node.children.values()):
            return
        items = node.mapping.values()
        if isinstance(sequence, list):
            self._finishes.append(lambda: sequence.__setitem__(slice(None), list(items)))
        else:
            mapping = _writable(parent, node.path)
            self._finishes.append(lambda: mapping.__setitem__(key, tuple(items)))

    def _module(self, node: ModuleNode, saved: Value) -> None:
        if self._selector.selects_whole(node.path):
            require_kept(node)
        items = children_of(saved)
        registered = {id(tensor) for tensor in (*node.module.parameters(), *node.module.buffers())}
        made_by_hooks: dict[str, object] = {}
        extra: dict[str, object] = {}
        for fqn, tensor in node.tensors.items():
            path = f"{node.path}.{fqn}"
            if id(tensor) not in registered and not self.takes_part(path):
                continue  # Not passed to the module either, in which there may be nothing that loads it.
            if id(tensor) not in registered and is_extra_state(fqn):
                extra[fqn] = tensor
                continue
            if not self.want(path, tensor, node.declared.get(id(tensor))):
                self._miss(
                    path, misfit_of_tensor(path, record) if is_subclass_record(record := items.get(fqn)) else None
                )
            elif id(tensor) not in registered:
                made_by_hooks[fqn] = tensor
        self._resized.explain(node.path, partial(own_loading, node))
        for fqn, tensor in node.tensors.items() if self._selection.grads else ():
            self._gradient(f"{node.path}.{fqn}", tensor, None, by_fsdp1=id(tensor) in node.declared)
        if self._selection.grads and self._takes_part_whole(node.path):
            self._finishes.append(lambda: forget_unreduced(node.module))
        values = {fqn: value for fqn, value in node.values.items() if self.takes_part(f"{node.path}.{fqn}")}
        for fqn, present in {**values, **extra}.items():
            path = f"{node.path}.{fqn}"
            entry = self._made_entry(path, items.get(fqn, ABSENT))
            if entry is ABSENT:
                self.missing.append(path)
            else:
                made_by_hooks[fqn] = put_together(entry, self._leaf(self._template(path, present)))
        known = {*node.values, *extra, *(fqn for fqn in node.tensors if is_subclass_record(items.get(fqn)))}
        self.unexpected += [f"{node.path}.{fqn}" for fqn in items if fqn not in known]
        if made_by_hooks:
            self._finishes.append(lambda: load_extra_entries(node, made_by_hooks))

    def _made_entry(self, path: str, saved: Value) -> Value:
        """Return what the checkpoint has of an entry that a module makes; `ABSENT` if it has nothing.

        Extra state belongs to its module alone. A tensor of it may have another size after a step (the scales of FP8,
        pickled), and it may have been no tensor.
        """
        is_tensor = is_extra_state(path) and self._catalog.stored_fqn(path) in self._catalog.tensors
        return TensorRef(path) if saved is ABSENT and is_tensor else saved

    def _template(self, path: str, present: object) -> dict[str, object]:
        """Return the present tensor of extra state, by name, if it can be filled."""
        spec = self._catalog.tensors.get(self._catalog.stored_fqn(path))
        fits = isinstance(present, torch.Tensor) and spec is not None and dtype_name(present.dtype) == spec.dtype
        return {path: present} if fits else {}

    def _gradient(self, name: str, tensor: torch.Tensor, declared: Sharded | None, *, by_fsdp1: bool = False) -> None:
        """Have a parameter's gradient filled as it was saved, or removed if none was saved."""
        fqn = f"{name}{gradients.SUFFIX}"
        stored = self._catalog.tensors.get(self._catalog.stored_fqn(fqn))
        if not tensor.is_leaf or (stored is None and tensor.grad is None) or not self.takes_part(fqn):
            return
        if stored is None:
            if id(tensor) not in self._gradients:
                self._finishes.append(lambda: gradients.give_gradient(tensor, None, fqn))
            return
        grad = self._gradients.setdefault(id(tensor), gradients.room_for_gradient(tensor, torch_dtype(stored.dtype)))
        self.want(fqn, grad, gradients.declared_for_gradient(fqn, declared, tensor, grad, by_fsdp1=by_fsdp1))
        self._finishes.append(lambda: gradients.give_gradient(tensor, grad, fqn))

    def _optimizer(self, view: OptimizerView, saved: Value) -> None:
        if isinstance(saved, Group) and saved.kind == "stateful":
            if has_own_state_dict(view.optimizer):
                self._optimizer_as_object(view, saved)
                return
            saved = saved.items.get("state")
        tensors = None
        if (by_number := numbered(saved)) is not None:
            saved, tensors = by_name(by_number, view, self._catalog, self._leaf({}))
            self._catalog = replace(self._catalog, aliases={**self._catalog.aliases, **tensors})
            self._subclasses.catalog = self._catalog
        if not isinstance(saved, Group) or saved.kind != "optimizer":
            if self._takes_part_whole(view.path):
                self.missing.append(view.path)
            return
        if self._selector.selects_whole(view.path):
            view.members.require_whole(view.path)
        restoration = OptimizerRestoration(view, saved, self, self._catalog, tensors, selection=self._selection)
        if restoration.fills_any:
            self._finishes.append(restoration.finish)
        self.misfits += restoration.misfits(self._catalog.optimizers.get(view.path))
        if self._selector.selects_whole(view.path) and (outside := custom_state(view)) is not None:
            self.missing += [f"{view.path}.{name}" for name in outside.names]

    def _optimizer_as_object(self, view: OptimizerView, saved: Group) -> None:
        """Have an optimizer load what its own `state_dict` returned when it was saved."""
        own = [dict(group) for group, _ in view.members.groups()]
        if not may_step(view):
            self._stateful(view.path, view.optimizer, saved, view.optimizer.state_dict)
        elif not is_sharded(view):
            self._stateful(view.path, view.optimizer, saved, dict)
        elif self._takes_part_whole(view.path):
            raise InvalidError(
                f"{view.path}: was saved by its own state_dict(), which may step {type(view.optimizer).__name__} if it "
                "is called now, and its parameters are sharded; expected state by parameter. Pass an object that "
                "forwards state_dict() and load_state_dict(), or leave it out with skip="
            )
        if not self._selection.hyperparameters:
            self._finishes.append(lambda: give_hyperparameters(view, own))

    def _stateful(
        self, path: str, stateful: Stateful, saved: Value, present_state: Callable[[], dict[str, object]]
    ) -> None:
        """Have an object load its saved state. The tensors of `present_state()` are filled if their shapes fit."""
        if not self._takes_part_whole(path):
            return
        present = present_state()
        if isinstance(saved, Group) and saved.kind == "stateful":
            saved = saved.items.get("state")
        elif isinstance(saved, dict) or (isinstance(saved, Group) and saved.kind in ("dict", "module")):
            # Systems that store only dicts do not distinguish an object's state from a dict or a module.
            saved = self._with_tensors(saved, present, path)
        else:
            self.missing.append(path)
            return
        loaded = put_together(saved, self._leaf(tensors_in(present, path)))
        require_dict(loaded, path)
        self._finishes.append(partial(load_into, stateful, loaded, path))

    def _with_tensors(self, saved: Value, present: object, path: str) -> dict[object, Value]:
        """Return a saved dict, with references to those listed tensors that the object's present state has too."""
        items = saved.items if isinstance(saved, Group) else saved
        assert isinstance(items, dict)
        known = present if isinstance(present, dict) else {}
        merged: dict[object, Value] = {
            key: self._with_tensors(value, known.get(key), f"{path}.{key}") if isinstance(value, Group) else value
            for key, value in items.items()
        }
        for key, value in known.items():
            fqn = f"{path}.{key}"
            if isinstance(value, torch.Tensor) and self._catalog.stored_fqn(fqn) in self._catalog.tensors:
                merged[key] = TensorRef(fqn)
        return merged

    def _miss(self, path: str, misfit: Misfit | None) -> None:
        """Record that nothing fills a name; and why, if the checkpoint has something else there."""
        self.missing.append(path)
        if misfit is not None:
            self.misfits.append(misfit)

    def _value(self, parent: DictNode, key: str, node: ValueNode, saved: Value) -> None:
        lost = lost_optimizers(node.path, node.value, saved)
        self.misfits += [each for each in lost if self._selector.selects_whole(each.fqn)]
        if isinstance(node.value, dict) and isinstance(saved, Group) and saved.kind == "dict":
            # It held tensors or modules when it was saved and is plain now: compare entry by entry.
            branch = DictNode(node.path, node.value)
            for name, value in node.value.items():
                branch.children[name] = ValueNode(f"{node.path}.{name}", value)
            self._dict(branch, saved)
            return
        values = [node.value] if saved is ABSENT else [node.value, saved]
        if not any(self._selector.selects_any(node.path, value) for value in values):
            self.skipped.append(node.path)
            return
        if saved is ABSENT or isinstance(saved, Group):
            self._miss(node.path, misfit_of_value(node.path, node.value, saved, self._catalog))
            return
        if isinstance(node.value, PerRank | RngState):
            self._finishes.append(loader_of_rank_value(node.path, node.value, saved, self._catalog, self._ranks))
            return
        merge = EntryMerge(self._selector, self.takes_part, self.missing, self._leaf)
        loaded = merge.merged(saved, node.value, node.path)
        mapping = _writable(parent, node.path)
        self._finishes.append(lambda: mapping.__setitem__(key, loaded))

    def _leaf(self, current: Mapping[str, object]) -> Callable[[Value], object]:
        def on_leaf(value: Value) -> object:
            if isinstance(value, TensorRef):
                return self.take(value, current.get(value.fqn))
            if is_subclass_record(value):
                return self.take_subclass(value, current)
            if isinstance(value, Skipped):
                if value.path not in current:
                    raise InvalidError(
                        f"{value.path}: was left out of the checkpoint, and the state has no such entry; leave it out "
                        "with skip="
                    )
                return current[value.path]
            return value

        return on_leaf

    def _forgive_ties(self) -> None:
        """Remove names from `missing` whose memory is filled under another name."""
        filled = {storage_key(tensor) for tensor in self._stored.values()} if self._without else set()
        for fqn, tensor in self._without:
            if storage_key(tensor) in filled and fqn in self.missing:
                self.missing.remove(fqn)
                self.held.pop(fqn, None)

    def _find_unexpected_tensors(self, state: Mapping[str, object]) -> None:
        known = self._used.union(self._stored_names.values(), self._catalog.masters.values())
        for fqn in self._catalog.tensors:
            if fqn in known:
                continue
            # A flat state has a key for each tensor, and a checkpoint of many stages or experts has many others.
            if any(name in state for name in with_names_above(fqn)) and self._selector.selects(fqn):
                self.unexpected.append(fqn)


def _writable(parent: DictNode, path: str) -> MutableMapping[str, object]:
    """Return the mapping of a node, to set an entry of it.

    Raises:
        InvalidError: It is read-only.
    """
    mapping = parent.mapping
    if not isinstance(mapping, MutableMapping):
        raise InvalidError(f"{path}: is in a read-only {type(mapping).__name__}; expected a dict to load it into")
    return mapping
