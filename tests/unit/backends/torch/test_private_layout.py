"""torch's private fields are where Holdfast reads them: each is read off a real object, and one that moved is named."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.backends.torch import private_layout
from tests.house.source import ROOT, tree_of
from tests.house.test_private_names import LAYOUT, is_private, names_of_torch, private_imports

pytestmark = pytest.mark.filterwarnings("ignore")
"""torch warns where it imports its own deprecated parts, and of FSDP1 on CPUs."""

WORLD = 4


@pytest.fixture(autouse=True, scope="module")
def rank_of_four() -> Iterator[None]:
    """This process as one rank of four whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()
    for made in (dtensor, wrapped, hybrid, fully_sharded):
        made.cache_clear()


# torch keeps equal meshes for the life of a process, each with the coordinate of whoever made it first. So these have
# names of their own.
@cache
def dtensor() -> DTensor:
    return DTensor.from_local(
        torch.ones(2, 3), init_device_mesh("cpu", (WORLD,), mesh_dim_names=("probed",)), [Shard(0)]
    )


def plain() -> torch.Tensor:
    return torch.ones(2, 3)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@cache
def wrapped() -> Any:
    """A module under FSDP1 after a forward and a backward."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"), use_orig_params=True)
    module(torch.ones(2, 3)).sum().backward()
    return module


@cache
def hybrid() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("probed_copies", "probed_parts"))
    return FullyShardedDataParallel(
        nn.Linear(3, 4),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def accumulating(reduce_dtype: torch.dtype | None = None) -> Any:
    """A module under FSDP2 with a gradient that no rank has reduced yet."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = nn.Linear(3, 4)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("probed",))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    module.set_requires_gradient_sync(False)  # type: ignore[operator]
    module(torch.ones(2, 3)).sum().backward()
    return module


@cache
def fully_sharded() -> Any:
    return accumulating()


def flat() -> Any:
    return wrapped()._handle.flat_param


GROUPS, GROUPS_OF_OTHER_VERSIONS = "_fsdp_param_groups", "_fsdp_param_group"
if torch.__version__ < (2, 12):
    GROUPS, GROUPS_OF_OTHER_VERSIONS = GROUPS_OF_OTHER_VERSIONS, GROUPS
"""The field of `FSDPState` on this torch, and on those at the other side of 2.12."""


def state_of_fsdp2() -> Any:
    return fully_sharded()._get_fsdp_state()


def group_of_fsdp2() -> Any:
    groups = getattr(state_of_fsdp2(), GROUPS)
    return groups[0] if isinstance(groups, list) else groups


def handle() -> Any:
    return wrapped()._handle


def held_by_fsdp2() -> Any:
    return group_of_fsdp2().fsdp_params[0]


def checkpointed() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(nn.Linear(3, 4))


def local_shard() -> Any:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard

    return LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], rank=0)


def sharded_tensor() -> type:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return ShardedTensor


class Counting(nn.Module):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: object) -> None: ...


def state_dict_with_extra_state() -> Any:
    return SimpleNamespace(**Counting().state_dict())


def backend_with_options() -> Any:
    # The fake backend states none.
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=7))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Probe:
    owner: Callable[[], Any]
    """Makes an object that has the field."""

    kind: Any = object
    """What the field holds."""


HOOKS = dict
PROBES: dict[str, Probe] = {
    "DTensor._local_tensor": Probe(dtensor, torch.Tensor),
    "DTensor._spec": Probe(dtensor, DTensorSpec),
    "_StridedShard.split_factor": Probe(lambda: private_layout.StridedShard(0, split_factor=2), int),
    "ShardedTensor.local_shards": Probe(sharded_tensor, Callable),
    "Shard.tensor": Probe(local_shard, torch.Tensor),
    "Shard.metadata": Probe(local_shard),
    "ShardMetadata.shard_offsets": Probe(lambda: local_shard().metadata, list),
    "Tensor._version": Probe(plain, int),
    "UntypedStorage._cdata": Probe(lambda: plain().untyped_storage(), int),
    "UntypedStorage._weak_ref": Probe(lambda: plain().untyped_storage(), Callable),
    "UntypedStorage._expired": Probe(lambda: torch.UntypedStorage, Callable),
    "UntypedStorage._free_weak_ref": Probe(lambda: torch.UntypedStorage, Callable),
    "torch._C": Probe(lambda: torch),
    "torch._C._autograd": Probe(lambda: torch._C),
    "torch._C._autograd._top_saved_tensors_default_hooks": Probe(lambda: torch._C._autograd, Callable),
    "torch._C._autograd._unsafe_set_version_counter": Probe(lambda: torch._C._autograd, Callable),
    "torch.ops.aten._to_copy": Probe(lambda: torch.ops.aten, Callable),
    "OpOverload._schema": Probe(lambda: private_layout.CAST, torch._C.FunctionSchema),
    "Tensor._post_accumulate_grad_hooks": Probe(lambda: nn.Parameter(plain()), None | HOOKS),
    "FlatParameter._is_flat_param": Probe(flat, bool),
    "OptimizedModule._orig_mod": Probe(lambda: torch.compile(net()), nn.Module),
    "CheckpointWrapper._checkpoint_wrapped_module": Probe(checkpointed, nn.Module),
    "FullyShardedDataParallel._fsdp_wrapped_module": Probe(wrapped, nn.Module),
    "state_dict()._extra_state": Probe(state_dict_with_extra_state, int),
    "state_dict()._metadata": Probe(lambda: net().state_dict(), dict),
    "Module._parameters": Probe(net, dict),
    "Module._buffers": Probe(net, dict),
    "Module._modules": Probe(net, dict),
    "Module._forward_hooks": Probe(net, HOOKS),
    "Module._forward_pre_hooks": Probe(net, HOOKS),
    "Module._save_to_state_dict": Probe(net, Callable),
    "Module._load_from_state_dict": Probe(net, Callable),
    "Module._state_dict_pre_hooks": Probe(net, HOOKS),
    "Module._state_dict_hooks": Probe(net, HOOKS),
    "Module._load_state_dict_pre_hooks": Probe(net, HOOKS),
    "Module._load_state_dict_post_hooks": Probe(net, HOOKS),
    "Optimizer._optimizer_load_state_dict_pre_hooks": Probe(lambda: torch.optim.SGD(net().parameters()), HOOKS),
    "FullyShardedDataParallel._handle": Probe(wrapped),
    "FullyShardedDataParallel._sync_gradients": Probe(wrapped, bool),
    "FullyShardedDataParallel._inter_node_pg": Probe(hybrid, dist.ProcessGroup),
    "FullyShardedDataParallel.training_state": Probe(wrapped, Enum),
    "FullyShardedDataParallel.sharding_strategy": Probe(wrapped, Enum),
    "FlatParamHandle.flat_param": Probe(handle, torch.Tensor),
    "FlatParamHandle.uses_sharded_strategy": Probe(handle, bool),
    "FlatParamHandle.process_group": Probe(handle, dist.ProcessGroup),
    "FlatParamHandle._use_orig_params": Probe(handle, bool),
    "FlatParameter._fqns": Probe(flat, Sequence),
    "FlatParameter._contiguities": Probe(flat, Sequence),
    "FlatParameter._param_extensions": Probe(flat, Sequence),
    "FlatParameter._params": Probe(flat, list),
    "FlatParameter._shard_param_infos": Probe(flat, Sequence),
    "FlatParameter._shapes": Probe(flat, Sequence),
    "FlatParameter._local_shard": Probe(flat, torch.Tensor),
    "_ShardParamInfo.intra_param_start_idx": Probe(lambda: flat()._shard_param_infos[0], int),
    "FSDPModule._get_fsdp_state": Probe(fully_sharded, Callable),
    f"FSDPState.{GROUPS}": Probe(state_of_fsdp2, list if GROUPS.endswith("s") else object),
    "FSDPParamGroup.fsdp_params": Probe(group_of_fsdp2, list),
    "FSDPParamGroup._partial_reduce_output": Probe(group_of_fsdp2, None | torch.Tensor),
    "FSDPParam.sharded_param": Probe(held_by_fsdp2, nn.Parameter),
    "FSDPParam.unsharded_accumulated_grad": Probe(held_by_fsdp2, None | torch.Tensor),
    "FSDPParam._unsharded_param": Probe(held_by_fsdp2, nn.Parameter),
    "distributed_c10d._get_default_store": Probe(lambda: dist.distributed_c10d, Callable),
    "PrefixStore._underlying_non_prefix_store": Probe(
        lambda: dist.PrefixStore("a", dist.HashStore()),  # type: ignore[attr-defined]
        private_layout.Store,
    ),
    "ProcessGroup._device_types": Probe(lambda: dist.group.WORLD, list),
    "ProcessGroup._get_backend": Probe(lambda: dist.group.WORLD, Callable),
    "Backend.Options._timeout": Probe(lambda: backend_with_options().options, timedelta),
}
"""Each field that Holdfast reads on this torch, by class and name."""


def moved(name: str, probe: Probe) -> str | None:
    """Return what is wrong with a field on this torch, or None."""
    try:
        owner = probe.owner()
    except (AttributeError, ImportError, TypeError) as error:
        return f"torch {torch.__version__}: nothing was made to look for {name}: {type(error).__name__}: {error}"
    attribute = name.rpartition(".")[2]
    if not hasattr(owner, attribute):
        return f"torch {torch.__version__}: {name} is gone"
    value = getattr(owner, attribute)
    if not isinstance(value, probe.kind):
        return f"torch {torch.__version__}: {name} is {type(value).__name__}; expected {probe.kind}"
    return None


@pytest.mark.parametrize("name", PROBES)
def test_the_field_is_where_it_is_read(name: str) -> None:
    found = moved(name, PROBES[name])
    assert found is None, f"{found}. Add a branch for this version to {private_layout.__file__}"


@pytest.mark.parametrize("name", [name for name, _ in private_imports(tree_of(LAYOUT))])
def test_the_import_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = hasattr(importlib.import_module(module), attribute)
    except ImportError:
        found = False
    assert found, f"torch {torch.__version__}: {name} is gone. Add a branch for this version to {LAYOUT}"


def test_every_private_name_has_a_probe() -> None:
    probed = {name.rpartition(".")[2] for name in PROBES} | {GROUPS_OF_OTHER_VERSIONS}
    assert names_of_torch() <= probed, f"without a probe: {sorted(names_of_torch() - probed)}"
    unread = {name for name in probed - names_of_torch() if is_private(name)}
    assert not unread, f"no longer read; remove the probes: {sorted(unread)}"


def test_a_field_that_moved_is_named() -> None:
    class Emptied:
        _version = "text"

    assert moved("DTensor._local_tensor", Probe(Emptied)) == f"torch {torch.__version__}: DTensor._local_tensor is gone"
    assert "Tensor._version is str; expected <class 'int'>" in str(moved("Tensor._version", Probe(Emptied, int)))
    assert "to look for Tensor.x: TypeError" in str(moved("Tensor.x", Probe(lambda: Emptied(1))))  # type: ignore[call-arg]


def test_hooks_for_saved_tensors_are_seen() -> None:
    assert private_layout.top_saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(print, repr):
        assert private_layout.top_saved_tensors_hooks() == (print, repr)


def test_the_arguments_that_an_op_changes_are_seen() -> None:
    written = [name for name, is_written in private_layout.arguments_of(torch.ops.aten.add_.Tensor) if is_written]
    assert written == ["self"]
    assert not any(is_written for _, is_written in private_layout.arguments_of(torch.ops.aten.view.default))


def test_a_version_is_set_for_all_views() -> None:
    tensor = plain()
    tensor.add_(1)
    private_layout.set_version_counter(tensor[0], 5)
    assert private_layout.version_counter(tensor) == 5


def test_a_weak_storage_keeps_its_identity_and_not_the_memory() -> None:
    tensor = plain()
    weak = private_layout.WeakStorage(tensor)
    assert weak.identity == private_layout.storage_identity(tensor.view(-1))
    assert weak.bytes == 24
    assert not weak.is_expired()
    del tensor
    assert weak.is_expired()
    assert weak.identity not in {private_layout.storage_identity(each) for each in [plain() for _ in range(8)]}


def test_a_hook_before_loading_is_the_function_that_was_registered() -> None:
    module, optimizer = net(), torch.optim.SGD(net().parameters())
    for hooked in (module, optimizer):
        assert private_layout.hooks_before_loading(hooked) == []
        hooked.register_load_state_dict_pre_hook(print)
        assert private_layout.hooks_before_loading(hooked) == [print]


def test_the_flat_parameter_of_a_wrapper_is_read_whole() -> None:
    view = private_layout.flat_parameter_of(wrapped())
    assert view is not None
    assert (view.keeps_parameters, view.is_sharded, view.activity) == (True, True, "IDLE")
    assert list(view.cuts()) == [("weight", True, False), ("bias", True, False)]
    assert [(start, shape) for _, start, shape in view.parts()] == [(0, (4, 3)), (0, (4,))]
    assert (view.ranks(), view.replica_ranks()) == ([0, 1, 2, 3], None)
    view.drop_gathered()
    copies = private_layout.flat_parameter_of(hybrid())
    assert copies is not None
    assert copies.replica_ranks() == [0, 2]
    assert private_layout.flat_parameter_of(net()) is None


def test_gradients_that_no_rank_has_reduced_are_seen() -> None:
    assert len(list(private_layout.unreduced_parameters(fully_sharded()))) == 2
    assert not list(private_layout.unreduced_parameters(net()))


# torch accumulates in a tensor beside the parameter where it reduces in another dtype; not so from 2.15 on.
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64], ids=str)
def test_gradients_that_no_rank_has_reduced_are_dropped(reduce_dtype: torch.dtype | None) -> None:
    module = accumulating(reduce_dtype)
    assert len(list(private_layout.unreduced_parameters(module))) == 2
    private_layout.forget_unreduced(module)
    assert not list(private_layout.unreduced_parameters(module))


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cu130", "2.15.0a0+git1234567", "2.13"])
def test_a_version_of_the_tested_range_needs_no_word(version: str) -> None:
    assert private_layout.untested(version) is None


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0+cpu", "2.17.0.dev20260901+cu130", "3.0.0", "1.13.1", "main"])
def test_a_version_outside_it_is_named_with_the_range_and_what_to_do(version: str) -> None:
    text = private_layout.untested(version)
    assert text is not None
    assert text.startswith(f"torch {version} is outside the tested range; expected torch>=2.10,<2.16. ")
    assert "Try one of each" in text


def test_an_untested_version_is_logged_once_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        private_layout.warn_of_untested_version("9.9.0")
        private_layout.warn_of_untested_version("9.9.0")
        private_layout.warn_of_untested_version("2.13.0")
    (record,) = caplog.records
    assert record.getMessage().startswith("torch 9.9.0 is outside the tested range")


def test_the_range_is_that_of_the_extra_the_readme_and_the_makefile() -> None:
    (first, low), (last, high) = private_layout.TESTED_FROM, private_layout.TESTED_BELOW
    stated = f">={first}.{low},<{last}.{high}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [f"torch{stated}"]
    assert stated in (ROOT / "README.md").read_text()
    assert f"({first}, {low}) <= version < ({last}, {high})" in (ROOT / "Makefile").read_text()


_WITHOUT_A_NAME = """
import sys, torch, holdfast
from torch.distributed.tensor import placement_types
del placement_types._StridedShard
checkpoint = holdfast.open_checkpoint(sys.argv[1])
for call in (lambda: holdfast.save("never", {"w": torch.ones(1)}), lambda: checkpoint.read("w", framework="torch")):
    try:
        call()
    except holdfast.InvalidError as error:
        print(error)
"""


def test_a_name_that_torch_no_longer_has_is_said_and_not_that_torch_is_missing(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"w": torch.ones(1)}, process_group=False)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT_A_NAME, str(tmp_path / "c")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "cannot import name '_StridedShard'" in line and "pip install 'holdfast[torch]'" in line
        assert "not installed" not in line
