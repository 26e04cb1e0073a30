"""Tries the installed wheel as a user would: its files, the quick start of its page, a save, a load, the command.

`make dist` runs it with the interpreter of an environment that holds the wheel and what it requires, in an empty
folder. With `--read RUN`, in an environment without torch: it reads a run that another environment saved.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = "checkpoints/run-7"
"""Where the quick start saves."""


def check_content(version: str) -> None:
    """Check that the package comes from the wheel, has its version, and holds what it must and nothing else."""
    import holdfast

    home = Path(holdfast.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"holdfast is imported from {home}, not from the wheel"
    distribution = importlib.metadata.distribution("holdfast")
    versions = {"file": version, "metadata": distribution.version, "__version__": holdfast.__version__}
    assert len(set(versions.values())) == 1, f"the versions differ: {versions}"
    files = [str(file) for file in distribution.files or ()]
    allowed = ("holdfast/", f"holdfast-{version}.dist-info/")
    strays = [name for name in files if not name.startswith(allowed) and not name.endswith("bin/holdfast")]
    assert not strays, f"the wheel holds {strays[:3]} beside the package"
    for wanted in ("holdfast/py.typed", f"holdfast-{version}.dist-info/licenses/LICENSE"):
        assert wanted in files, f"the wheel lacks {wanted}"


def run_command(*arguments: str) -> str:
    """Return what the installed command prints."""
    command = Path(sys.executable).parent / "holdfast"
    result = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"holdfast {' '.join(arguments)}: {result.stdout}{result.stderr}"
    return result.stdout


def run_quick_start() -> dict[str, object]:
    """Run the first block of Python in the README that the wheel carries; return its names."""
    text = str(importlib.metadata.metadata("holdfast").get_payload())
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None, "the page of the package shows no Python"
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(block[1], "README.md", "exec"), names)
    return names


def save_and_load() -> None:
    """Save a state, load it into another, and compare."""
    import torch

    import holdfast

    saved, loaded = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    holdfast.save("one", {"model": saved, "epoch": 3})
    state: dict[str, object] = {"model": loaded, "epoch": 0}
    holdfast.load("one", state)
    assert torch.equal(saved.weight, loaded.weight) and torch.equal(saved.bias, loaded.bias) and state["epoch"] == 3


def read_run(root: str) -> None:
    """Read a run without torch, by the command and by the API."""
    import holdfast

    assert re.search(r"^\s*300\b", run_command("ls", root), re.MULTILINE), "holdfast ls does not list step 300"
    step = f"{root}/step-000000000300"
    run_command("verify", step)
    assert holdfast.open_checkpoint(step).read("model.weight").shape == (4, 4)
    assert "torch" not in sys.modules


def main() -> None:
    """Try the wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="The wheel that is installed here.")
    parser.add_argument("--read", metavar="RUN", help="Only read this run, without torch.")
    arguments = parser.parse_args()
    check_content(arguments.wheel.name.split("-")[1])
    assert run_command("--version").strip() == f"holdfast {arguments.wheel.name.split('-')[1]}"
    if arguments.read is not None:
        read_run(arguments.read)
        return
    names = run_quick_start()
    assert names["step"] == 300, "the quick start did not reach step 300"
    assert run_quick_start()["first"] == 300, "the quick start did not load the step that it saved"
    save_and_load()
    assert re.search(r"^\s*300\b", run_command("ls", ROOT), re.MULTILINE), "holdfast ls does not list step 300"


if __name__ == "__main__":
    main()
