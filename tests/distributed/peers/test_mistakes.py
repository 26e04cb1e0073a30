"""Mistakes in naming nodes, secrets, ports and folders of peers: refused at the start, by what to do next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.peers.statement import StatedNode, require_named
from holdfast.errors import InvalidError
from holdfast.training.runs.tiers.agent_files import read_serving
from tests.distributed.peers.nodes import is_alive, node_memory
from tests.support.forked_processes import REPOSITORY, environment
from tests.support.gloo_worlds import Case, World, run_world

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_NODE", "a")
    with node_memory() as folder:
        yield folder


def job(root: Path | str, memory: Path | str) -> holdfast.CheckpointManager:
    """Open a job of one node."""
    near = holdfast.Tier(f"peers://{memory}", every=1, orphan_seconds=5.0, linger_seconds=0.0)
    return holdfast.CheckpointManager(root, every=100, near=near, process_group=False, preemption=False)


def secret_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


Set = Callable[[str, str], None]


def _others_look_in(memory: Path, folder: Path, setenv: Set) -> None:
    (memory / "a").mkdir()
    (memory / "a").chmod(0o755)


def _others_read_the_secret(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_SECRET_FILE", secret_file(folder, SECRET, 0o640))


def _short_secret(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_SECRET_FILE", secret_file(folder, "hunter2\n"))


def _no_secret(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_SECRET_FILE", str(folder / "secret"))


def _port_without_number(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_PORT", "http")


def _port_too_large(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_PORT", "70000")


def _node_with_a_slash(memory: Path, folder: Path, setenv: Set) -> None:
    setenv("HOLDFAST_NODE", "../b")


MISTAKES = {
    _others_look_in: r"/a: .*with mode 0755; expected .*mode 0700.*chmod 700 /dev/shm/.*/a",
    _others_read_the_secret: r"HOLDFAST_SECRET_FILE=.*: other users can read.*chmod 600",
    _short_secret: r"HOLDFAST_SECRET_FILE=.*: 7 bytes; expected 32 or more. Make one: head",
    _no_secret: r"HOLDFAST_SECRET_FILE=.*: No such file",
    _port_without_number: r"HOLDFAST_PORT='http': expected a port",
    _port_too_large: r"HOLDFAST_PORT='70000': expected a port",
    _node_with_a_slash: r"HOLDFAST_NODE='\.\./b': expected a name without '/'",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_refused_at_the_start(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Path, Path, Set], None]
) -> None:
    mistake(memory, tmp_path, monkeypatch.setenv)
    with pytest.raises(InvalidError, match=MISTAKES[mistake]):
        job(tmp_path / "root", memory)
    assert not (tmp_path / "root").exists()


def test_a_root_that_no_agent_can_open_is_refused(memory: Path) -> None:
    with pytest.raises(InvalidError, match="no agent can open the root memory://run; expected a path or a URL"):
        job("memory://run", memory)


def test_a_port_in_use_is_refused_by_its_number(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("HOLDFAST_PORT", str(port))
        with pytest.raises(InvalidError, match=rf"node a: .*could not listen at 127\.0\.0\.1:{port} .*Choose another"):
            job(tmp_path / "root", memory)


def test_one_node_alone_is_told_and_works(tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    for resumed in (None, 1):
        with job(tmp_path / "root", memory) as manager:
            state = {"weights": torch.zeros(3)}
            assert manager.load(state) == resumed
            manager.save(1 + (resumed or 0), {"weights": torch.ones(3)}).wait()
    assert "the job has one node, a: nothing protects its memory" in caplog.text


@pytest.mark.long
def test_an_agent_of_another_secret_is_replaced(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET_FILE", secret_file(tmp_path, SECRET))
    killed = (
        "import os, sys; from tests.distributed.peers.test_mistakes import job; "
        "manager = job(sys.argv[1], sys.argv[2]); os._exit(0)"
    )
    command = [sys.executable, "-c", killed, str(tmp_path / "root"), str(memory)]
    subprocess.run(command, cwd=REPOSITORY, env=environment(), check=True, timeout=60)
    earlier = read_serving(str(memory / "a"))
    assert earlier is not None and is_alive(earlier.pid)
    secret_file(tmp_path, f"other {SECRET}")
    with job(tmp_path / "root", memory) as manager:
        manager.save(1, {"weights": torch.ones(3)}, near_only=True).wait()
        serving = read_serving(str(memory / "a"))
        assert serving is not None and serving.pid != earlier.pid and not is_alive(earlier.pid)


@pytest.mark.long
def test_without_h11_the_command_that_installs_it_is_named(tmp_path: Path, memory: Path) -> None:
    program = (
        "import sys; sys.modules['h11'] = None; import holdfast; "
        f"near = holdfast.Tier('peers://{memory}', every=1); "
        f"holdfast.CheckpointManager({str(tmp_path)!r}, process_group=False, near=near)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "InvalidError" in done.stderr and "pip install 'holdfast[agent]'" in done.stderr, done.stderr


def test_nodes_that_cannot_be_told_apart_are_refused() -> None:
    require_named([StatedNode("a", machine="1"), StatedNode("a", machine="1"), StatedNode("b", machine="1")])
    with pytest.raises(InvalidError, match=r"rank 1: node 'a' is on two hosts.*Set HOLDFAST_NODE"):
        require_named([StatedNode("a", machine="1"), StatedNode("a", machine="2")])
    with pytest.raises(
        InvalidError, match=r"rank 1: nodes 0 and 1 of torchrun are on one host, 'a'.*Set HOLDFAST_NODE"
    ):
        require_named([StatedNode("a", torch_node="0"), StatedNode("a", torch_node="1")])


def refused(world: World, memory: str, environment: list[dict[str, str]], group: int | None = None) -> str:
    """Return the error of a job with an environment for each rank."""
    os.environ |= environment[world.rank]
    try:
        near = holdfast.Tier(f"peers://{memory}", every=1, group=group)
        holdfast.CheckpointManager(world.scratch / "root", every=100, near=near, preemption=False)
    except InvalidError as error:
        return str(error)
    finally:
        for name in environment[world.rank]:
            del os.environ[name]
    return ""


@pytest.mark.long
def test_nodes_that_do_not_fit_together_are_refused_on_all_ranks(tmp_path: Path, memory: Path) -> None:
    def case(name: str, environment: list[dict[str, str]], group: int | None = None) -> Case:
        arguments = {"memory": str(memory), "environment": environment, "group": group}
        return Case("tests.distributed.peers.test_mistakes:refused", arguments, name)

    nodes = [{"HOLDFAST_NODE": "a"}, {"HOLDFAST_NODE": "b"}]
    secrets = []
    for number, node in enumerate(nodes):
        (tmp_path / node["HOLDFAST_NODE"]).mkdir()
        file = secret_file(tmp_path / node["HOLDFAST_NODE"], f"{number}{SECRET}")
        secrets.append({**node, "HOLDFAST_SECRET_FILE": file})
    torchrun = [{"GROUP_RANK": "0", "HOLDFAST_NODE": ""}, {"GROUP_RANK": "1", "HOLDFAST_NODE": ""}]
    cases = [case("group", nodes, 3), case("secrets", secrets), case("torchrun", torchrun)]
    results = run_world(2, cases, tmp_path / "world")
    for name, expected in {
        "group": "Tier(group=3): expected 2 to 2, the number of nodes",
        "secrets": "nodes 'a' and 'b' have different secrets",
        "torchrun": "nodes 0 and 1 of torchrun are on one host",
    }.items():
        assert all(expected in str(value) for value in results.values(name)), results.values(name)
