"""What everything that reads a checkpoint says of a crafted one, in a process that watches itself.

Run as a program: `python -m tests.hostile.trial FOLDER` prints one JSON line per case of the corpus, then one of its
own peak memory.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from typer.main import get_command

import holdfast
from holdfast import api
from holdfast.cli.app import app
from holdfast.errors import CheckpointError
from tests.hostile.corpus import CASES
from tests.hostile.crafting import STEP, Crafted, content_of, make_template, state_of

COMMAND = get_command(app)
"""Built once: typer's own runner of tests builds it for every call, which takes longer than most of them."""

STAGES = ("open", "objects", "tensors", "read", "verify", "load", "manager", "list")
FORBIDDEN_EVENTS = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
    "ctypes.dlopen", "socket.connect", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
    "os.chmod", "os.truncate", "shutil.rmtree",
}  # fmt: skip

NOTES = re.compile(
    r"open \('\.tmp-[0-9a-f]+', None, \d+\)"
    r"|os\.remove \('(\.tmp-[0-9a-f]+|[0-9a-f]{32}\.json)', \d+\)"
    r"|os\.mkdir \('(quarantine|readers|reports)', \d+, \d+\)"
    r"|os\.rmdir \('readers', \d+\)"
    r"|os\.link \('\.tmp-[0-9a-f]+', 'step-\d{12}\.[0-9a-f]{16}\.json', \d+, \d+\)"
    r"|os\.rename \('\.tmp-[0-9a-f]+', '(load-[0-9a-f]{16}-r\d{5}|[0-9a-f]{32})\.json', \d+, \d+\)"
)
"""What a load may do to a run, under names that no crafted run chose: say that it reads, and take that back; leave its
report; record that a step is damaged."""

NOTED = re.compile(
    r"/quarantine(/step-\d{12}\.[0-9a-f]{16}\.json)?|/step-\d{12}/reports(/load-[0-9a-f]{16}-r\d{5}\.json)?"
)
"""Where what stays of that lies, below the root; below `outside` where a step is a link to that."""


class Watch:
    """Notes what a trial must not do: run something, or change the file system."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.active:
            return
        if event in FORBIDDEN_EVENTS or (event == "open" and _writes(arguments)):
            self.seen.append(f"{event} {str(arguments)[:200]}")


def _writes(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def tree_of(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder, but for times of access."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            found[path] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def told_tree(inside: Path, crafted: Crafted) -> dict[str, tuple[object, ...]]:
    """As `tree_of`, without what a load may leave; folders that it lies in may have another size and time."""
    step_folder = f"/{crafted.folder.name}"
    root, linked = str(crafted.root), str(inside / "outside")
    found = tree_of(inside)
    # A step that is a link has its reports where it lies.
    below = {path: path.removeprefix(root).replace(linked, step_folder) for path in found}
    noted = {path for path, lies in below.items() if NOTED.fullmatch(lies)}
    holding = {root, linked, *(str(each) for each in crafted.root.glob("step-*"))}
    return {
        path: (status[0], status[3]) if path in holding else status
        for path, status in found.items()
        if path not in noted
    }


def tried(crafted: Crafted, good: dict[str, object]) -> dict[str, Any]:
    """Try one crafted run every way there is; what each stage said, by stage."""
    said: dict[str, str] = {}
    unexpected: list[str] = []

    def stage(name: str, act: Callable[[], object]) -> object:
        try:
            return act()
        except CheckpointError as error:
            said.setdefault(name, f"{type(error).__name__}: {error}")
        except BaseException as error:
            unexpected.append(f"{name}: {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
            said.setdefault(name, "unexpected")
        return None

    folder = crafted.folder
    checkpoint: Any = stage("open", lambda: holdfast.open_checkpoint(folder))
    if checkpoint is not None:
        stage("objects", lambda: (checkpoint.objects, checkpoint.objects_document()))
        names = stage("tensors", lambda: list(checkpoint.tensors)) or []
        assert isinstance(names, list)
        for name in [*names, *checkpoint.aliases][:50]:
            stage("tensors", lambda name=name: (checkpoint.pieces(name), checkpoint.written_by(name)))
            stage("read", lambda name=name: checkpoint.read(name))
            stage("read", lambda name=name: checkpoint.read(name, framework="torch"))
        stage("read", lambda: checkpoint.per_rank(0))
        damages = stage("verify", lambda: [str(each) for each in checkpoint.verify()])
        if damages:
            assert isinstance(damages, list)
            said["verify"] = f"damage: {damages[0]}"

    def load() -> None:
        state = state_of(5)
        holdfast.load(folder, state, process_group=False)
        if content_of(state) != good:
            said.setdefault("content", "what was loaded is not what was saved")

    def manager() -> None:
        state = state_of(5)
        with holdfast.CheckpointManager(crafted.root, process_group=False) as opened:
            opened.steps()
            if opened.load(state) is None:
                said.setdefault("manager", "no step")
            elif content_of(state) != good:
                said.setdefault("content", "what was loaded is not what was saved")

    stage("load", load)
    stage("manager", manager)
    shown = set("".join(_shown(arguments, unexpected) for arguments in _commands(crafted)))
    run = stage("list", lambda: api.list_steps(crafted.root))
    if isinstance(run, api.RunRecord) and (run.error or any(each.error for each in run.steps)):
        said.setdefault("list", "a step or the run is damaged")
    return {
        "said": said,
        "unexpected": unexpected,
        "unclean": sorted({each for each in shown if not each.isprintable() and each != "\n"}),
    }


def _commands(crafted: Crafted) -> list[list[str]]:
    folder, root = str(crafted.folder), str(crafted.root)
    return [
        [*each, *more] for each in (["ls", root], ["inspect", folder], ["verify", folder]) for more in ([], ["--json"])
    ]


def _shown(arguments: list[str], unexpected: list[str]) -> str:
    """Run a command of the command line and return all that it prints, as a stream of UTF-8 that is no terminal."""
    status: object = 0
    with TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True) as shown:
        with redirect_stdout(shown), redirect_stderr(shown):
            try:
                COMMAND.main(arguments, prog_name="holdfast")
            except SystemExit as ended:
                status = ended.code
            except Exception as error:
                unexpected.append(f"{arguments[0]}: {type(error).__name__}: {error}")
        if status not in (0, 1, 2, None):
            unexpected.append(f"{arguments[0]}: exit {status}")
        return shown.buffer.getvalue().decode()  # type: ignore[attr-defined]


def main(workplace: Path, chosen: list[str]) -> None:
    """Try every case in a folder of its own."""
    torch.set_num_threads(1)
    template = workplace / "template"
    make_template(template)
    good = content_of(state_of(3))
    watch = Watch()
    tried(Crafted(template), good)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        inside = workplace / "case"
        shutil.copytree(template, inside / "root")
        crafted = Crafted(inside / "root")
        case.craft(crafted)
        before = told_tree(inside, crafted)
        watch.seen.clear()
        watch.active = True
        outcome = tried(crafted, good)
        watch.active = False
        outcome |= {
            "name": case.name,
            "changed": sorted(str(each) for each in before.items() ^ told_tree(inside, crafted).items())[:10],
            "did": [each for each in watch.seen if not NOTES.fullmatch(each)][:10],
            "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024,
        }
        print(json.dumps(outcome), flush=True)
        shutil.rmtree(inside)
    print(json.dumps({"peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024}), flush=True)


if __name__ == "__main__":
    assert STEP == 7
    main(Path(sys.argv[1]), sys.argv[2:])
