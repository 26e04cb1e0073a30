"""What `torch.distributed.checkpoint` saves on four ranks of any layout, Holdfast reads and loads onto another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import holdfast
from tests.distributed.foreign import dcp_cases
from tests.support.gloo_worlds import Case, Results, run_world
from tests.support.small_networks import adamw, digest, plain

CASES = "tests.distributed.foreign.dcp_cases"
KINDS: dict[str, dict[str, object]] = {
    "fsdp2": {"mesh": [4]},
    "hsdp": {"mesh": [2, 2]},
    "tensor-parallel": {"mesh": [2, 2], "tensor_parallel": True},
    "replicas": {},
    "flattened": {"mesh": [4], "flatten": True},
    "async": {"mesh": [4], "asynchronous": True},
    "threads": {"mesh": [4], "writer": {"thread_count": 2}},
    "file-by-item": {"mesh": [2, 2], "writer": {"single_file_per_rank": False}},
    "safetensors": {"mesh": [4], "writer": {"serialization_format": "safetensors"}},
}
LOADED_BY_THREE = ("hsdp", "flattened", "replicas")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def four(root: Path) -> Results:
    """Four ranks that saved in every way."""
    cases = [Case(f"{CASES}:save", {"path": str(root / name), **kind}, name) for name, kind in KINDS.items()]
    results = run_world(4, [*cases, Case(f"{CASES}:export", {"path": str(root / "exported")})], root / "four")
    for name in (*KINDS, "export"):
        results.values(name)
    return results


@pytest.fixture(scope="module")
def three(root: Path, four: Results) -> Results:
    """Three ranks that loaded what four had saved."""
    cases = [Case(f"{CASES}:load", {"path": str(root / name)}, name) for name in LOADED_BY_THREE]
    cases.append(Case(f"{CASES}:load_by_dcp", {"path": str(root / "exported")}))
    return run_world(3, cases, root / "three")


def truth_of(root: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file((root / name).with_suffix(f".{dcp_cases.TRUTH}"))


@pytest.mark.parametrize("name", KINDS)
def test_every_tensor_reads_bit_for_bit(root: Path, four: Results, name: str) -> None:
    found = holdfast.open_checkpoint(root / name)
    truth = truth_of(root, name)
    assert set(found.tensors) == set(truth)
    for key, tensor in truth.items():
        read: Any = found.read(key, framework="torch")
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), key
    assert found.step == 2
    assert found.manifest.world_size == 4
    assert found.objects["notes"] == {"tags": ["a", ("b", 1)]}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "safetensors"])
def test_dcp_itself_reads_the_same(root: Path, four: Results, name: str) -> None:
    """The truth that the tests compare with is DCP's own: so its reader says too."""
    truth = truth_of(root, name)
    target = {key: torch.empty_like(tensor) for key, tensor in truth.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=root / name, no_dist=True)
    assert all(torch.equal(target[key], tensor) for key, tensor in truth.items())


@pytest.mark.parametrize("name", [name for name in KINDS if name != "tensor-parallel"])
def test_it_loads_into_a_plain_model_and_optimizer(root: Path, four: Results, name: str) -> None:
    net = plain(2)
    optimizer = adamw(net)
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "step": 0, "notes": None, "scheduler": {}}
    report = holdfast.load(root / name, state, process_group=False)
    assert report.missing == report.unexpected == ()
    truth = truth_of(root, name)
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, truth[f"model.{key}"])
    for key, parameter in net.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, truth[f"optimizer.state.{key}.{kind}"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert state["step"] == 2
    assert state["scheduler"]["step_size"] == 3


@pytest.mark.parametrize("name", LOADED_BY_THREE)
def test_another_number_of_ranks_loads_it(root: Path, three: Results, name: str) -> None:
    truth = truth_of(root, name)
    expected = {key.removeprefix("model."): digest(each) for key, each in truth.items() if key.startswith("model.")}
    for found in three.values(name):
        assert isinstance(found, dict)
        assert {key: found[key] for key in expected} == expected
        for key, each in truth.items():
            if key.startswith("optimizer.state."):
                fqn, _, kind = key.removeprefix("optimizer.state.").rpartition(".")
                assert found[f"{fqn}/{kind}"] == digest(each)


def test_dcp_itself_loads_what_was_exported_onto_another_number_of_ranks(four: Results, three: Results) -> None:
    saved = four.values("export")
    assert all(each == saved[0] for each in saved)
    assert three.values("load_by_dcp") == [saved[0]] * 3
