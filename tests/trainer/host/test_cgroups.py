"""Memory that ran out: the kernel's word on it, wherever a container has put it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.host.cgroups import MemoryGroup

LIMIT = 200 << 20
ROOT = Path(__file__).parents[3]


class Machine:
    """A process 7 in some control group, as /proc and /sys show it."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "self").mkdir()

    def mount(self, kind: str, root: str, options: str, groups: str) -> None:
        line = f"36 25 0:30 {root} {self.sys} rw,nosuid - {kind} cgroup {options}"
        (self.proc / "self" / "mountinfo").write_text(f"22 1 0:20 / / rw - ext4 sda rw\n{line}\n")
        (self.proc / "7" / "cgroup").write_text(groups)

    def write(self, below: str, **files: str) -> Path:
        folder = self.sys / below
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".", 1)).write_text(f"{text}\n")
        return folder

    def group(self) -> MemoryGroup | None:
        return MemoryGroup.of(7, proc=self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_narrowest_limit_above_a_process_is_the_one_that_counts(machine: Machine) -> None:
    """A job of 4 GB in a slice of 64: the limit is not at the process's own group."""
    machine.mount("cgroup2", "/", "rw", "0::/slice/job/step\n")
    machine.write("slice", memory__max=str(64 << 30), memory__peak=str(5 << 30))
    machine.write("slice/job", memory__max=str(4 << 30), memory__peak=str(4 << 30))
    machine.write(
        "slice/job/step",
        memory__max="max",
        memory__peak="12",
        memory__events="low 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 0",
    )
    group = machine.group()
    assert group is not None
    assert group.kills() == 3
    assert group.limit() == (4 << 30, 4 << 30)


def test_a_container_sees_only_its_own_part_of_the_hierarchy(machine: Machine) -> None:
    """Docker with version 1 mounts /docker/ID as the root, and /proc names the whole path."""
    groups = "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    machine.mount("cgroup", "/docker/ab", "rw,memory", groups)
    machine.write(
        ".",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1",
        memory__limit_in_bytes=str(2 << 30),
        memory__max_usage_in_bytes=str((2 << 30) - 4096),
    )
    group = machine.group()
    assert group is not None
    assert group.kills() == 1
    assert group.limit() == ((2 << 30) - 4096, 2 << 30)


def test_where_there_is_no_limit_the_machine_is_it(machine: Machine) -> None:
    """The kernel counts what it ended because the whole machine had nothing left, too."""
    machine.mount("cgroup", "/", "rw,memory", "4:memory:/\n")
    machine.write(
        ".", memory__oom_control="oom_kill 0", memory__limit_in_bytes="9223372036854771712"
    )
    group = machine.group()
    assert group is not None
    assert group.limit() is None


def test_nothing_is_claimed_where_nothing_can_be_read(machine: Machine) -> None:
    """A sandbox without control groups."""
    machine.mount("tmpfs", "/", "rw", "0::/\n")
    assert machine.group() is None


@pytest.fixture
def narrow() -> Iterator[Path]:
    """A real control group of 200 MB, if one can be made here."""
    own = MemoryGroup.of(os.getpid())
    if own is None:
        pytest.skip("no control groups of memory here")
    folder = own.top / f"everstep-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if own.is_v1 else "memory.max"
        (folder / name).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_child_that_the_kernel_ends_for_memory_is_reported_as_that(
    narrow: Path, tmp_path: Path
) -> None:
    """A rank that outgrew its container was "ended by SIGKILL", as if somebody had done it."""
    record = _end_in(narrow, tmp_path, "held = []\nwhile True: held.append(bytearray(1 << 20))")
    assert record["signal"] == "SIGKILL"
    assert record["memory"]["limit"] == LIMIT
    assert record["memory"]["used"] > 0.9 * LIMIT


def test_a_child_that_somebody_kills_has_not_run_out_of_memory(
    narrow: Path, tmp_path: Path
) -> None:
    """The same group, the same signal, and no word of the kernel."""
    record = _end_in(narrow, tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert (record["signal"], record["memory"]) == ("SIGKILL", None)


_SLOT = """
import json, sys
from pathlib import Path
from tests.trainer.slot.test_actor import Slot
Path(sys.argv[1], "cgroup.procs").write_text("0")
slot = Slot(Path(sys.argv[2]), [sys.executable, "-c", sys.argv[3]])
slot.start()
print(json.dumps(slot.until("exit")))
"""


def _end_in(group: Path, run_dir: Path, child: str) -> dict[str, Any]:
    """How a slot in this group reports the end of such a child."""
    command = [sys.executable, "-c", _SLOT, str(group), str(run_dir), child]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
