"""Free memory: the host's, every limit of a control group up to the root, and the ranks that share each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.core.engine import memory_limits
from holdfast.core.engine.memory_limits import MemoryShare, memory_domains, memory_statement
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.support.tuning import tuned

V1_MOUNT = "/sys/fs/cgroup/memory"
V2_MOUNT = "/sys/fs/cgroup"
V1_UNLIMITED = 9223372036854771712
HOST_FREE = 1 << 30


class Machine:
    """A tree of files as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "root"
        (self.proc / "self").mkdir(parents=True)
        self.boots("one")
        (self.proc / "meminfo").write_text(f"MemTotal: {HOST_FREE // 512} kB\nMemAvailable: {HOST_FREE // 1024} kB\n")

    def boots(self, boot: str) -> None:
        (self.proc / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (self.proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mounts(self, *lines: str) -> None:
        (self.proc / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in lines))

    def mounts_v1(self, shown: str = "/", at: str = V1_MOUNT) -> None:
        self.mounts(
            f"33 31 0:30 {shown} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            f"35 31 0:32 {shown} {at} rw,relatime shared:9 - cgroup cgroup rw,memory",
        )

    def mounts_v2(self, shown: str = "/", at: str = V2_MOUNT) -> None:
        self.mounts(f"41 31 0:38 {shown} {at} rw,relatime shared:9 master:2 - cgroup2 cgroup2 rw,nsdelegate")

    def has_v1(self, group: str, limit: int, usage: int, stat: str = "", at: str = V1_MOUNT) -> None:
        self._has(at + group, {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat})

    def has_v2(self, group: str, limit: int | str, usage: int, stat: str = "", at: str = V2_MOUNT) -> None:
        self._has(at + group, {"memory.max": limit, "memory.current": usage, "memory.stat": stat})

    def free(self) -> int:
        return min(domain.free_bytes for domain in memory_domains(self.proc, self.root))

    def is_this(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the code that runs see this machine from now on."""
        monkeypatch.setattr(memory_limits, "memory_domains", lambda: memory_domains(self.proc, self.root))

    def _has(self, folder: str, files: dict[str, int | str]) -> None:
        at = self.root / folder.lstrip("/")
        at.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (at / name).write_text(f"{content}\n")


def test_free_memory_is_what_the_host_has() -> None:
    (total,) = (
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    assert 0 < MemoryShare().free_bytes() <= total * 1024


def test_without_control_groups_the_host_decides(tmp_path: Path) -> None:
    assert Machine(tmp_path).free() == HOST_FREE


def test_a_limit_of_version_1_is_found_at_the_groups_own_path(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("9:name=systemd:/", "4:memory:/jobs/7", "1:cpu:/", "0::/")
    machine.mounts_v1()
    machine.has_v1("", V1_UNLIMITED, 900_000)
    machine.has_v1("/jobs", V1_UNLIMITED, 900_000)
    machine.has_v1("/jobs/7", 1_000_000, 900_000)
    assert machine.free() == 100_000


def test_version_1_may_name_several_controllers_together(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:hugetlb,memory:/jobs")
    machine.mounts("35 31 0:32 / /cg/memory rw - cgroup cgroup rw,hugetlb,memory")
    machine.has_v1("/jobs", 1_000_000, 900_000, at="/cg/memory")
    assert machine.free() == 100_000


def test_version_1_without_a_limit_leaves_it_to_the_host(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:memory:/jobs")
    machine.mounts_v1()
    machine.has_v1("/jobs", V1_UNLIMITED, 900_000)
    (host,) = memory_domains(machine.proc, machine.root)
    assert host.free_bytes == HOST_FREE


def test_a_limit_of_version_2_is_found_at_the_groups_own_path(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/system.slice/slurmstepd.scope/job_7/step_0")
    machine.mounts_v2()
    machine.has_v2("/system.slice/slurmstepd.scope/job_7/step_0", 1_000_000, 900_000)
    assert machine.free() == 100_000


def test_max_is_no_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/job")
    machine.mounts_v2()
    machine.has_v2("/job", "max", 900_000)
    assert machine.free() == HOST_FREE


def test_the_smallest_headroom_on_the_way_to_the_root_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/a/b/c")
    machine.mounts_v2()
    machine.has_v2("/a", 5_000_000, 1_000_000)
    # Its siblings use most of what the parent may have.
    machine.has_v2("/a/b", 3_000_000, 2_800_000)
    machine.has_v2("/a/b/c", 1_000_000, 100_000)
    assert machine.free() == 200_000
    machine.has_v2("/a/b", "max", 2_800_000)
    assert machine.free() == 900_000
    machine.has_v2("/a", 5_000_000, 4_999_000)
    assert machine.free() == 1_000


def test_both_versions_at_once_give_the_smaller(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:memory:/one", "0::/two")
    machine.mounts(
        f"35 31 0:32 / {V1_MOUNT} rw - cgroup cgroup rw,memory", "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 x rw"
    )
    machine.has_v1("/one", 1_000_000, 900_000)
    machine.has_v2("/two", 1_000_000, 950_000, at="/sys/fs/cgroup/unified")
    assert machine.free() == 50_000


def test_the_page_cache_of_a_control_group_counts_as_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/")
    machine.mounts_v2()
    machine.has_v2("", 1_000_000, 900_000, "anon 1\nfile 2\nactive_file 300000\ninactive_file 400000")
    assert machine.free() == 800_000
    machine.has_v2("", "max", 900_000)
    assert machine.free() > 1_000_000


def test_version_1_counts_the_page_cache_of_the_groups_below(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:memory:/jobs")
    machine.mounts_v1()
    stat = "inactive_file 7\nactive_file 7\ntotal_inactive_file 400000\ntotal_active_file 300000"
    machine.has_v1("/jobs", 1_000_000, 900_000, stat)
    assert machine.free() == 800_000


def test_a_container_sees_its_own_group_as_the_mounts_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:memory:/docker/abc/inner")
    machine.mounts_v1(shown="/docker/abc")
    machine.has_v1("", 2_000_000, 1_950_000)
    machine.has_v1("/inner", 1_000_000, 900_000)
    assert machine.free() == 50_000


def test_a_group_outside_of_what_is_mounted_falls_back_to_the_mount(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has_v2("", 1_000_000, 900_000)
    for group, shown in (("/elsewhere", "/docker/abc"), ("/docker", "/docker/abc"), ("/../../up", "/docker/abc")):
        machine.belongs_to(f"0::{group}")
        machine.mounts_v2(shown=shown)
        assert machine.free() == 100_000, (group, shown)


def test_of_several_mounts_the_one_that_holds_the_group_is_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/mine")
    machine.mounts("41 31 0:38 / /cg rw - cgroup2 x rw", "42 31 0:38 /other /bound rw - cgroup2 x rw")
    machine.has_v2("/mine", 1_000_000, 900_000, at="/cg")
    machine.has_v2("", 1_000_000, 999_999, at="/bound")
    assert machine.free() == 100_000


def test_a_mount_point_with_a_space_is_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/")
    machine.mounts_v2(at=r"/control\040groups")
    machine.has_v2("", 1_000_000, 900_000, at="/control groups")
    assert machine.free() == 100_000


def test_the_usual_mount_is_read_where_mounts_are_not_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has_v2("", 1_000_000, 900_000)
    assert machine.free() == 100_000
    machine.has_v1("/job", 1_000_000, 950_000)
    machine.belongs_to("4:memory:/job")
    assert machine.free() == 50_000


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/a/b", "nonsense", "")
    machine.mounts_v2()
    machine.mounts("nonsense", "", " - cgroup2", f"41 31 0:38 / {V2_MOUNT} rw - cgroup2 x rw")
    machine.has_v2("/a", 1_000_000, 900_000)
    machine.has_v2("/a/b", 500_000, 499_999)
    (machine.root / "sys/fs/cgroup/a/b/memory.current").unlink()
    assert machine.free() == 100_000
    (machine.root / "sys/fs/cgroup/a/memory.max").write_text("")
    assert machine.free() == HOST_FREE


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/a")
    machine.mounts_v2()
    machine.has_v2("/a", 1_000_000, 1_000_001)
    assert machine.free() == 0


def shares(monkeypatch: pytest.MonkeyPatch, ranks: list[Machine]) -> list[int]:
    """Return what each rank may allocate after all of them stated their domains."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    statements = []
    for machine in ranks:
        machine.is_this(monkeypatch)
        statements.append(memory_statement())
    assert max(map(len, statements)) <= 32, "what each rank receives grows with this"
    free = []
    for machine in ranks:
        machine.is_this(monkeypatch)
        free.append(MemoryShare(statements).free_bytes())
    return free


def test_ranks_of_one_host_share_it_whatever_launched_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Machine(tmp_path / "here"), Machine(tmp_path / "there")
    there.boots("two")
    assert shares(monkeypatch, [here, here, here, there]) == [HOST_FREE // 3] * 3 + [HOST_FREE]


def test_ranks_of_one_control_group_share_what_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/job/step")
    machine.mounts_v2()
    machine.has_v2("/job", 1_000_000, 600_000)
    machine.has_v2("/job/step", "max", 600_000)
    assert shares(monkeypatch, [machine] * 4) == [100_000] * 4


def test_pods_with_groups_of_their_own_share_only_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [Machine(tmp_path / name) for name in ("one", "other")]
    for pod in pods:
        # Each pod sees its own group as the root of the hierarchy.
        pod.belongs_to("0::/")
        pod.mounts_v2()
        pod.has_v2("", 10_000_000, 4_000_000)
    assert shares(monkeypatch, pods) == [6_000_000] * 2
    for pod in pods:
        pod.has_v2("", HOST_FREE, 0)
    assert shares(monkeypatch, pods) == [HOST_FREE // 2] * 2, "each may have the whole host, but not both"


def test_tasks_with_groups_of_their_own_share_the_group_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, tasks = Machine(tmp_path), []
    for task in range(2):
        machine = Machine(tmp_path / str(task))
        machine.root = tmp_path
        machine.belongs_to(f"0::/job/task_{task}")
        machine.mounts_v2()
        machine.has_v2(f"/job/task_{task}", 8_000_000 + task, 5_000_000)
        tasks.append(machine)
    machine.has_v2("/job", 16_000_000, 12_000_000)
    assert shares(monkeypatch, tasks) == [2_000_000] * 2


def test_the_groups_that_leave_least_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("0::/1/2/3/4/5/6")
    machine.mounts_v2()
    levels = ["/1", "/1/2", "/1/2/3", "/1/2/3/4", "/1/2/3/4/5", "/1/2/3/4/5/6"]
    for level, usage in zip(levels, (0, 900_000, 0, 800_000, 0, 0), strict=True):
        machine.has_v2(level, 1_000_000, usage)
    assert shares(monkeypatch, [machine] * 4) == [25_000] * 4


def test_ranks_that_did_not_ask_count_those_that_torchrun_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path).is_this(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert MemoryShare().free_bytes() == HOST_FREE // 4
    statement = memory_statement()
    assert MemoryShare([statement] * 2).free_bytes() == HOST_FREE // 4, "a group of two of the four"
    assert MemoryShare([statement] * 8).free_bytes() == HOST_FREE // 8


def test_arenas_and_usage_at_construction_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.belongs_to("4:memory:/job")
    machine.mounts_v1()
    limit, usage, ranks = 4000 * PAGE_BYTES, 3000 * PAGE_BYTES, 5
    machine.has_v1("/job", limit, usage)
    machine.is_this(monkeypatch)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def arena_pages(comm: ThreadComm) -> int:
        arena = Job(comm, SystemClock(), tuned(Settings(chunk_bytes=PAGE_BYTES), window_bytes=PAGE_BYTES)).arena
        return next(count for count in range(1, 10_000) if not arena.holds(count)) - 1

    pages = [int(str(count)) for count in outcomes_of_ranks(ranks, arena_pages)]
    assert pages == [100] * ranks
    assert sum(pages) * PAGE_BYTES + usage < limit
