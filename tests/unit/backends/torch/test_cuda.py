"""A state on a GPU: copied beside training by a stream of its own, into pinned memory; these run where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.torch.local_shards import Ranks
from holdfast.backends.torch.side_stream import SideStream, side_stream
from holdfast.backends.torch.state.collect import collect
from holdfast.base.ports.framework import Selection
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.errors import InvalidError, UnavailableError
from tests.unit.backends.torch.test_lazy import LAZY, Gate, in_place, rebinding, require_equal, run_at, through_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Staging = Literal["copy", "lazy"]
STAGINGS: tuple[Staging, ...] = ("copy", "lazy")
ALONE = Ranks(0, 1, lambda rank: rank)
CYCLES = 1 << 28
"""What the GPU is kept busy for: about a seventh of a second."""


@pytest.fixture
def device() -> torch.device:
    return torch.zeros(1, device="cuda").device


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


class Training:
    """A model with buffers, on the GPU, and fused AdamW: its step counts lie there too."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64, device="cuda")).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": each.detach().clone() for name, each in self.model.state_dict().items()}
        for number, each in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{number}.{key}": value.clone() for key, value in each.items()}
        return found


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    other = Training(seed=9)
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        assert manager.load(other.state, step) == step
    return other.values()


def manager_at(root: Path, staging: Staging, **settings: object) -> holdfast.CheckpointManager:
    chosen = replace(LAZY, staging=staging, arena_bytes_max=None, **settings)  # type: ignore[arg-type]
    return holdfast.CheckpointManager(root, process_group=False, settings=chosen)


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_training_saved_at_every_step_is_saved_as_by_blocking(tmp_path: Path, staging: Staging) -> None:
    training = Training()
    expected = {}
    with manager_at(tmp_path / "behind", staging, verify_lazy_copy=staging == "lazy") as manager:
        for step in range(6):
            training.step()
            expected[step] = training.values()
            holdfast.save(tmp_path / f"blocking-{step}", training.state, process_group=False)
            handle = manager.save(step, training.state)
        report = handle.wait()
        assert report is not None and report.staging == staging
    for step, values in expected.items():
        other = Training(seed=9)
        holdfast.load(tmp_path / f"blocking-{step}", other.state, process_group=False)
        require_equal(other.values(), values)
        require_equal(loaded(tmp_path / "behind", step), values)


def test_the_step_waits_for_what_a_small_arena_has_not_taken(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate)
    expected = training.values()
    handle = run.save(1, training.state)
    training.backward()
    assert not handle.staged.done()
    gate.open_after(0.2)
    training.optimizer.step()
    assert handle.staged.done()
    report = handle.wait(timeout=60.0)
    assert isinstance(report, SaveReport) and report.staging == "lazy" and report.fence_seconds > 0.1
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


@pytest.mark.parametrize(("change", "verify_lazy_copy"), [(in_place, False), (rebinding, False), (through_data, True)])
def test_a_change_behind_the_fence_aborts_the_save(
    tmp_path: Path, gate: Gate, change: Callable[[object], None], verify_lazy_copy: bool
) -> None:
    training = Training()
    run: CheckpointManager = run_at(tmp_path, gate, verify_lazy_copy=verify_lazy_copy)
    handle = run.save(1, training.state)
    change(training)
    gate.opened.set()
    if change is not rebinding:  # What it binds lies on the host.
        training.step()
    with pytest.raises(InvalidError, match="changed while being copied lazily"):
        handle.wait(timeout=60.0)
    assert run.steps() == []
    run.close()


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("awaited", [False, True])
def test_copies_come_after_what_the_stream_of_the_call_was_given_before_it(
    tmp_path: Path, staging: Staging, awaited: bool
) -> None:
    """And not after what it is given once the fence is passed."""
    place = tmp_path / "awaited" if awaited else tmp_path / "run" / "step-000000000001"
    with torch.cuda.stream(torch.cuda.Stream()):
        weights = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        optimizer = torch.optim.SGD([weights], lr=1.0)
        state = {"weights": weights, "optimizer": optimizer}
        with manager_at(tmp_path / "run", staging) as manager:
            torch.cuda._sleep(CYCLES)
            with torch.no_grad():
                weights.fill_(1.0)
            if awaited:
                holdfast.save(place, state, process_group=False)
            else:
                handle = manager.save(1, state)
                weights.grad = torch.full_like(weights, -4.0)
                optimizer.step()
                handle.wait()
                assert weights[0].item() == 5.0
    found = holdfast.open_checkpoint(place).read("weights")
    assert (found == 1.0).all()  # type: ignore[attr-defined]


def test_copies_overlap_what_the_stream_of_the_call_is_given_after_it(tmp_path: Path) -> None:
    """A lazy save is staged while the kernels of forward and backward still run."""
    weights = nn.Parameter(torch.ones(1 << 20, device="cuda"))
    state = {"weights": weights, "optimizer": torch.optim.SGD([weights], lr=1.0)}
    with manager_at(tmp_path, "lazy") as manager:
        manager.save(0, state).wait()
        torch.cuda.synchronize()
        handle = manager.save(1, state)
        torch.cuda._sleep(8 * CYCLES)
        computed = torch.cuda.Event()
        computed.record()
        handle.wait("staged")
        assert not computed.query(), "the copies waited for kernels that were queued after the call"
        torch.cuda.synchronize()


def test_memory_for_copies_is_pinned_and_let_go(tmp_path: Path, device: torch.device) -> None:
    training = Training()
    manager = manager_at(tmp_path, "copy")
    with manager:
        manager.save(1, training.state).wait()
        arena: Arena = manager._job.arena  # type: ignore[attr-defined]
        assert arena._unpinned == []
        blocks = [torch.frombuffer(block, dtype=torch.uint8) for block, _ in arena._pinned]
        assert blocks and all(block.is_pinned() for block in blocks)
        assert side_stream(device)._stream.priority == torch.cuda.Stream.priority_range()[0]
    assert not any(block.is_pinned() for block in blocks)


def test_a_state_in_host_memory_pins_nothing(tmp_path: Path, device: torch.device) -> None:
    with manager_at(tmp_path, "copy") as manager:
        manager.save(1, {"weights": torch.ones(1 << 20)}).wait()
        assert manager._job.arena._pinned == []  # type: ignore[attr-defined]


def test_memory_that_cannot_be_pinned_is_copied_into_all_the_same(device: torch.device) -> None:
    """Pinning twice is what the runtime refuses anywhere; its error is not taken for the next kernel's."""
    side = SideStream(device)
    buffer = allocate_aligned(1 << 20)
    unpin = side.pin(buffer)
    with pytest.raises(UnavailableError, match="page-locking 1048576 bytes"):
        side.pin(buffer)
    assert torch.ones(8, device=device).sum().item() == 8.0
    unpin()
    unpin()
    assert torch.ones(8, device=device).sum().item() == 8.0
    side.pin(buffer)()


def test_a_save_into_memory_that_is_not_pinned_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(side: SideStream, memory: memoryview) -> Callable[[], None]:
        raise UnavailableError("no more of it")

    monkeypatch.setattr(SideStream, "pin", refuse)
    training = Training()
    with manager_at(tmp_path, "lazy") as manager:
        for step in range(3):
            expected = training.values()
            manager.save(step, training.state)
            training.step()
        manager.wait()
    require_equal(loaded(tmp_path, 2), expected)
    assert caplog.text.count("is not pinned") == 1


def test_a_call_while_a_graph_is_captured_is_refused(tmp_path: Path) -> None:
    weights = torch.ones(1 << 20, device="cuda")
    with manager_at(tmp_path, "copy") as manager:
        manager.save(1, {"weights": weights}).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            weights.add_(1.0)
            with pytest.raises(InvalidError, match=r"a CUDA graph is being captured.*Save before the capture"):
                manager.save(2, {"module": nn.ParameterList([nn.Parameter(weights)])})
        graph.replay()
        assert manager.save(3, {"weights": weights}).wait() is not None
        assert manager.steps() == [1, 3]
    found = holdfast.open_checkpoint(tmp_path / "step-000000000003").read("weights")
    assert (found == 2.0).all()  # type: ignore[attr-defined]


def test_strided_conjugated_and_tiny_tensors(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = torch.randn(300, 500, device="cuda")
    state = {
        "transposed": whole.T,
        "every_other": whole[:, ::2],
        "one": whole[7:8, 3],
        "conjugated": torch.randn(200, 300, dtype=torch.complex64, device="cuda").conj(),
        "half": whole.to(torch.bfloat16),
        "count": torch.tensor(7, device="cuda"),
        "host": torch.randn(5),
        **{f"tiny_{n}": torch.full((n % 5,), float(n), device="cuda") for n in range(200)},
    }
    with manager_at(tmp_path, "copy") as manager:
        manager.save(1, state).wait()
        for device in ("cuda", "cpu"):
            targets = {name: torch.zeros_like(each, device=device).contiguous() for name, each in state.items()}
            manager.load(targets, 1)
            for name, each in state.items():
                assert torch.equal(targets[name].cpu(), each.resolve_conj().cpu()), (device, name)


def test_parts_in_host_memory_and_on_a_gpu_are_refused_for_saving_and_loading(tmp_path: Path) -> None:
    parts = [torch.arange(4.0), torch.arange(4.0, 8.0, device="cuda")]
    declared = holdfast.Sharded(parts, (8,), [(0,), (4,)])
    with pytest.raises(InvalidError, match=r"t: its parts on this rank are on devices \['cpu', 'cuda:0'\]"):
        holdfast.save(tmp_path / "c", {"t": declared}, process_group=False)
    holdfast.save(tmp_path / "c", {"t": torch.arange(8.0)}, process_group=False)
    with pytest.raises(InvalidError, match=r"t: its parts on this rank are on devices"):
        holdfast.load(tmp_path / "c", {"t": declared}, process_group=False)


def test_what_fails_in_the_midst_of_queueing_is_raised_once_nothing_is_under_way(device: torch.device) -> None:
    source, into = torch.ones(1 << 20, dtype=torch.uint8, device=device), allocate_aligned(1 << 20)
    side = SideStream(device)
    unpin = side.pin(into)

    def queue() -> None:
        torch.cuda._sleep(CYCLES)
        torch.frombuffer(into, dtype=torch.uint8).copy_(source, non_blocking=True)
        raise ValueError("no memory")

    side.follow()
    with pytest.raises(ValueError, match="no memory"):
        side.queued(queue)
    assert bytes(into) == b"\x01" * (1 << 20)
    unpin()


def test_what_is_loaded_comes_after_what_the_stream_of_the_call_was_given_before_it(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"weights": torch.arange(1 << 20, dtype=torch.float32)}, process_group=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        square = torch.empty(1 << 10, 1 << 10, device="cuda").T
        targets = {"weights": torch.empty(1 << 20, device="cuda")}
        torch.cuda._sleep(CYCLES)
        targets["weights"].zero_()
        holdfast.load(tmp_path / "c", targets, process_group=False)
        assert torch.equal(targets["weights"].cpu(), torch.arange(1 << 20, dtype=torch.float32))
    holdfast.save(tmp_path / "d", {"square": torch.arange(1 << 20).reshape(1 << 10, 1 << 10).float()})
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        square.zero_()
        holdfast.load(tmp_path / "d", {"square": square}, process_group=False)
        assert torch.equal(square.cpu().reshape(-1), torch.arange(1 << 20).float())


def test_no_thread_makes_a_context_on_a_device_that_is_not_its_own(tmp_path: Path) -> None:
    """Every rank of a host would, and the first device would hold them all."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    script = (
        "import sys, torch, holdfast\n"
        "weights = torch.ones(1 << 20, device='cuda:1')\n"
        "before = torch._C._cuda_hasPrimaryContext(0)\n"
        "with holdfast.CheckpointManager(sys.argv[1], process_group=False) as manager:\n"
        "    manager.save(1, {'weights': weights}).wait()\n"
        "    manager.load({'weights': weights}, 1)\n"
        "assert torch._C._cuda_hasPrimaryContext(0) == before\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True, timeout=120)


def test_a_forked_child_leaves_pinned_memory_alone(tmp_path: Path, gate: Gate) -> None:
    training = Training()
    run = run_at(tmp_path, gate, arena_bytes_max=1 << 20)
    expected = training.values()
    handle = run.save(1, training.state)
    handle.wait("staged", timeout=60.0)
    child = os.fork()
    if child == 0:
        run._job.arena.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    handle.wait(timeout=60.0)
    require_equal(loaded(tmp_path, 1), expected)
    run.close()


def test_a_sample_on_another_thread_comes_after_what_the_stream_of_the_call_was_given_before_it() -> None:
    """The agreement samples sibling meshes on a thread of its own, which has another current stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        row, square = (
            torch.zeros(shape, dtype=torch.uint8, device="cuda") for shape in ((1 << 20,), (1 << 10, 1 << 10))
        )
        torch.cuda._sleep(CYCLES)
        row.fill_(1)
        square.fill_(1)
        shards = collect({"row": row, "square": square.T}, Selection(), ALONE).shards
    with ThreadPoolExecutor(1) as thread:
        for shard in shards:
            sampled = thread.submit(shard.source.sample, 64, 1024, whole_bytes=0, shift=0.5).result()
            assert sampled == b"\x01" * (64 << 10)


def test_a_tensor_is_sampled_alike_wherever_it_lies(tmp_path: Path) -> None:
    """Ranks of one job may hold copies in host memory and on a GPU, and then these agree."""
    whole = torch.randn(700, 900)
    found = []
    for each in (whole, whole.cuda(), whole.T, whole.cuda().T, whole[0, :5], whole.cuda()[0, :5]):
        (shard,) = collect({"t": each}, Selection(), ALONE).shards
        found.append(bytes(shard.source.sample(64, 1024, whole_bytes=0, shift=0.7)))
    assert found[::2] == found[1::2]
