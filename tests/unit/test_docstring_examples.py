"""Every public function and every public method of `CheckpointManager` has an example that runs."""

from __future__ import annotations

import inspect
import json
import signal
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Settings, api
from holdfast._face import wiring
from holdfast.backends.stores.memory import MemoryStore


def documented() -> Iterator[tuple[str, object]]:
    """Yield public functions, the manager and its public methods and properties, by name."""
    for name in api.__all__:
        if inspect.isfunction(getattr(api, name)):
            yield name, getattr(api, name)
    yield "CheckpointManager", api.CheckpointManager
    for each in api.CheckpointManager.__mro__[:-1]:
        for name, member in vars(each).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, classmethod | property)):
                yield f"CheckpointManager.{name}", member


def example(docstring: str) -> str:
    """Return the lines below `Example:` that are indented further; no text without such a block."""
    _, _, rest = docstring.partition("\nExample:\n")
    lines = rest.splitlines()
    end = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])).strip()


EXAMPLES = {name: example(inspect.getdoc(each) or "") for name, each in documented()}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Prepare the names and files that the examples use: a run of three steps, a checkpoint, a file of torch.

    The manager of the run has loaded the newest step. At the end, no thread of an example may be left.
    """
    api.end_idle_threads()
    before = set(threading.enumerate())
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    holdfast.save("checkpoint", state)
    torch.save(model.state_dict(), "model.pt")  # noqa: TID251 - a source of an import
    with holdfast.CheckpointManager("run-7") as run:
        for step, loss in ((100, 0.5), (200, 0.3), (300, 0.4)):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state["epoch"] = step
            run.save(step, state, metrics={"loss": loss, "accuracy": 1 - loss}).wait()
        run.tag(200, "best")
    with holdfast.CheckpointManager("run-8", near=holdfast.Tier("nvme/run-8", every=10)) as run:
        run.save(100, state).wait()
    with ExitStack() as ending:
        ending.callback(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        settings = Settings(collect_grace_seconds=0)
        manager = ending.enter_context(
            holdfast.CheckpointManager("run-7", every=100, preemption=False, settings=settings)
        )
        manager.load(state)
        store = MemoryStore("run-9")
        job = wiring.saving_job(False, settings, store.url)
        ending.callback(job.close)
        yield {
            "holdfast": holdfast,
            "policies": holdfast.policies,
            "json": json,
            "signal": signal,
            "torch": torch,
            "model": model,
            "optimizer": optimizer,
            "state": state,
            "manager": manager,
            "store": store,
            "job": job,
        }
    api.end_idle_threads()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", EXAMPLES)
def test_there_is_a_short_example(name: str) -> None:
    assert 1 <= len(EXAMPLES[name].splitlines()) <= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, names: dict[str, object]) -> None:
    exec(compile(EXAMPLES[name], f"example of {name}", "exec"), names)
