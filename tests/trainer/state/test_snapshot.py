"""Snapshots: whole or not there, whatever dies, whatever is damaged, wherever memory ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.compute.pieces import Piece, whole
from trainer.state import snapshot, snapshot_writer
from trainer.state.snapshot import SnapshotError, SnapshotRejected
from trainer.state.snapshot_writer import Interval, SnapshotContext, SnapshotFailed, SnapshotWriter

LEAVES = 6
STATE_BYTES = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A snapshot directory of its own in shared memory; nothing of it may stay."""
    path = snapshot.directory_of(tmp_path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def context(generation: int = 1, rank: int = 0) -> SnapshotContext:
    return SnapshotContext(
        run="/runs/first", generation=generation, rank=rank, world_size=2, replica=rank
    )


def held(*leaves: tuple[str, Any]) -> list[Piece]:
    return [
        Piece(name=name, shape=leaf.shape, index=whole(leaf.shape), values=leaf)
        for name, leaf in leaves
    ]


def state(step: int) -> list[Piece]:
    size = STATE_BYTES // LEAVES // 4
    return held(*((f"layer.{number}", np.full(size, step, np.float32)) for number in range(LEAVES)))


def values_of(directory: Path, step: int, generation: int = 1) -> list[Any]:
    found, _ = snapshot.load_pieces(directory, generation, step)
    return [found.read(piece.name, piece.index) for piece in state(step)]


def write(directory: Path, *steps: int, generation: int = 1, rank: int = 0) -> None:
    writer = SnapshotWriter(directory, context(generation, rank), 1)
    for step in steps:
        writer.take(step, state(step), {"step": step}, volatile=True)
    writer.close()


def steps_of(directory: Path) -> list[tuple[int, int]]:
    return [(info.generation, info.step) for info in snapshot.list_snapshots(directory)]


def test_a_snapshot_comes_back_as_it_was_taken(directory: Path) -> None:
    """Whatever the dtype or shape: a restored run must not differ by a bit."""
    leaves: list[tuple[str, Any]] = [
        ("weights", np.arange(12, dtype=np.float32).reshape(3, 4)),
        ("count", np.int32(7).reshape(())),
        ("nothing", np.zeros((0, 3), np.float64)),
        ("key", np.array([1, 2**32 - 1], np.uint32)),
    ]
    writer = SnapshotWriter(directory, context(), 1)
    writer.take(5, held(*leaves), {"step": 5, "loss": 1.5}, volatile=True)
    writer.close()
    target = {name: np.zeros_like(leaf) for name, leaf in leaves}
    ordered = dict(sorted(target.items()))
    with pytest.raises(SnapshotRejected, match="no snapshot of generation 1, step 6"):
        snapshot.load(directory, 1, 6, ordered)
    host, meta = snapshot.load(directory, 1, 5, ordered, run="/runs/first")
    assert meta == {"step": 5, "loss": 1.5}
    for name, leaf in leaves:
        assert host[name].dtype == leaf.dtype
        assert host[name].shape == leaf.shape
        assert host[name].tobytes() == leaf.tobytes()


def test_only_we_can_read_the_directory_and_its_files(directory: Path) -> None:
    """The state of a model in /dev/shm is for nobody else on the machine."""
    write(directory, 1)
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in directory.iterdir()}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert modes == {0}


def test_the_last_snapshots_stay_while_the_next_is_written(directory: Path) -> None:
    """A death in the middle of a copy must find the snapshot before it untouched."""
    write(directory, *range(1, 8))
    assert steps_of(directory) == [(1, 7), (1, 6), (1, 5)]
    for step in (5, 6, 7):
        assert all((values == step).all() for values in values_of(directory, step))


def test_a_snapshot_is_taken_before_the_state_moves_on(directory: Path) -> None:
    """Donated buffers are written over by the next step; a late copy would be torn."""
    values = np.zeros(STATE_BYTES // 4, np.float32)
    writer = SnapshotWriter(directory, context(), 1)
    for step in range(1, 30):
        values[:] = step
        writer.take(step, held(("weights", values)), {"step": step}, volatile=True)
        values[:] = -1.0
    writer.close()
    found, _ = snapshot.load_pieces(directory, 1, 29)
    assert (found.read("weights", whole(values.shape)) == 29).all()


def test_what_is_still_on_its_way_from_a_device_is_copied_by_the_thread(directory: Path) -> None:
    """On accelerators the next step runs while the copy of the state is brought to the host."""
    import jax.numpy as jnp

    writer = SnapshotWriter(directory, context(), 1)
    for step in (1, 2):
        weights = jnp.full((256, 256), step, jnp.bfloat16)
        writer.take(step, held(("weights", weights)), {"step": step}, volatile=False)
    writer.close()
    host, _ = snapshot.load(directory, 1, 2, {"weights": np.asarray(weights)})
    assert host["weights"].dtype == jnp.bfloat16
    assert (host["weights"] == 2).all()


CHILD = """
import sys
import numpy as np
from trainer.compute.pieces import Piece, whole
from trainer.state.snapshot_writer import SnapshotContext, SnapshotWriter
context = SnapshotContext(run="r", generation=1, rank=0, world_size=1, replica=0)
writer = SnapshotWriter(sys.argv[1], context, 1)
values = np.zeros(int(sys.argv[2]) // 4, np.float32)
piece = Piece(name="weights", shape=values.shape, index=whole(values.shape), values=values)
step = 0
while True:
    step += 1
    values[:] = step
    writer.take(step, [piece], {"step": step}, volatile=True)
    if step == 5:
        print("going", flush=True)
"""


def test_a_kill_in_the_middle_of_a_copy_leaves_no_torn_snapshot(directory: Path) -> None:
    """What is listed is whole: its values are all of one step, and of the step that it names."""
    for trial in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(directory), str(8 << 20)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        time.sleep(0.003 * trial)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        listed = steps_of(directory)
        assert len(listed) >= 2
        for generation, step in listed:
            found, meta = snapshot.load_pieces(directory, generation, step)
            assert meta["step"] == step
            assert (found.read("weights", ((0, 2 << 20),)) == step).all()
        snapshot.sweep(directory)
    assert not directory.exists()


def damage_data(directory: Path) -> None:
    path = directory / manifest(directory)["data"]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def truncate_data(directory: Path) -> None:
    path = directory / manifest(directory)["data"]
    path.write_bytes(path.read_bytes()[:-4096])


def remove_data(directory: Path) -> None:
    (directory / manifest(directory)["data"]).unlink()


def damage_manifest(directory: Path) -> None:
    path = directory / "g1-s3-r0.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 3', b'"step": 4', 1))


def remove_manifest(directory: Path) -> None:
    (directory / "g1-s3-r0.json").unlink()


def foreign_manifest(directory: Path) -> None:
    rewrite(directory, run="/runs/another")


def future_version(directory: Path) -> None:
    rewrite(directory, version=3)


def renamed_manifest(directory: Path) -> None:
    (directory / "g1-s2-r0.json").rename(directory / "g1-s3-r0.json")


def manifest(directory: Path) -> dict[str, Any]:
    text = (directory / "g1-s3-r0.json").read_bytes().splitlines()[0]
    return dict(json.loads(text))


def rewrite(directory: Path, **changes: Any) -> None:
    text = json.dumps({**manifest(directory), **changes}).encode()
    (directory / "g1-s3-r0.json").write_bytes(b"%s\n%08x\n" % (text, zlib.crc32(text)))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage_data, "another checksum"),
        (truncate_data, "bytes"),
        (remove_data, "cannot be read"),
        (damage_manifest, "manifest has another checksum"),
        (remove_manifest, "no snapshot of generation 1, step 3"),
        (foreign_manifest, "belongs to another run"),
        (future_version, "version 3"),
        (renamed_manifest, "another snapshot than its name"),
    ],
)
def test_a_damaged_snapshot_is_refused_aloud(directory: Path, harm: Any, reason: str) -> None:
    """Bytes that are not what was written must never be trained on."""
    write(directory, 1, 2, 3)
    harm(directory)
    with pytest.raises(SnapshotRejected, match=reason) as raised:
        snapshot.load_pieces(directory, 1, 3, run="/runs/first")
    assert raised.value.path.startswith(str(directory))
    snapshot.load_pieces(directory, 1, 1, run="/runs/first")


def test_a_sound_replica_stands_in_for_a_damaged_one(directory: Path) -> None:
    """Two nodes' copies on one machine: one bad copy is no reason to go back to the disk."""
    write(directory, 3)
    write(directory, 3, rank=1)
    damage_data(directory)
    assert all((values == 3).all() for values in values_of(directory, 3))


def test_a_state_of_another_form_is_refused(directory: Path) -> None:
    """A changed model must not be filled with the bytes of the one before."""
    write(directory, 1)
    target = {f"layer.{number}": np.zeros(4, np.float32) for number in range(LEAVES)}
    with pytest.raises(SnapshotRejected, match=r"leaf layer\.0 is float32"):
        snapshot.load(directory, 1, 1, target)


def test_a_directory_that_others_can_write_is_not_read(directory: Path) -> None:
    """Anyone may create files in /dev/shm under a name that they guess."""
    write(directory, 1)
    directory.chmod(0o770)
    assert snapshot.list_snapshots(directory) == []
    with pytest.raises(SnapshotRejected, match="not ours alone"):
        snapshot.load_pieces(directory, 1, 1)
    outcomes: list[Any] = []
    writer = SnapshotWriter(directory, context(2), 1, on_outcome=outcomes.append)
    writer.take(2, state(2), {}, volatile=True)
    writer.close()
    assert [type(one) for one in outcomes] == [SnapshotFailed]
    assert "not ours alone" in outcomes[0].error


def test_a_link_in_place_of_the_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    """A link could make us write, or delete, elsewhere."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "elsewhere" / "g1-s1-r0.json").write_text("precious")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="no directory"):
        snapshot.sweep(directory)
    assert snapshot.list_snapshots(directory) == []
    directory.unlink()


def test_a_sweep_takes_all_that_is_ours_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    """Shared memory that nobody frees is lost until the machine restarts."""
    write(directory, 1)
    (directory / "g1-s9-r0.json.tmp").write_text("a draft")
    snapshot.sweep(directory)
    assert not directory.exists()
    snapshot.sweep(directory)
    write(directory, 1)
    (directory / "precious").write_text("not ours")
    with pytest.raises(SnapshotError, match="precious"):
        snapshot.sweep(directory)
    assert len(list(directory.iterdir())) == 3
    with pytest.raises(SnapshotError, match="not named"):
        snapshot.sweep(tmp_path)


def test_a_discarded_snapshot_is_not_found_again(directory: Path) -> None:
    """A rejected snapshot must not be chosen a second time."""
    write(directory, 1, 2, 3)
    snapshot.discard(directory, 1, 3)
    snapshot.discard(directory, 1, 3)
    assert steps_of(directory) == [(1, 2), (1, 1)]


def test_lower_generations_go_when_their_successor_has_two_of_its_own(directory: Path) -> None:
    """Until then they are all that a second failure could go back to."""
    write(directory, 1, 2, 3)
    write(directory, 4, generation=2)
    assert steps_of(directory) == [(2, 4), (1, 3), (1, 2), (1, 1)]
    write(directory, 5, 6, generation=3)
    assert steps_of(directory) == [(3, 6), (3, 5)]
    assert len(list(directory.iterdir())) == 4


def test_full_memory_is_told_once_and_tried_again_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a map without memory behind it would end the process with SIGBUS."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    outcomes: list[Any] = []
    published: list[int] = []
    writer = SnapshotWriter(
        directory, context(), 1, on_published=published.append, on_outcome=outcomes.append
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert writer.due(1, 0.1)
        writer.take(1, state(1), {}, volatile=True)
    assert [one.step for one in outcomes] == [1]
    assert "No space left" in outcomes[0].error
    assert list(directory.iterdir()) == []
    assert not writer.due(2, 0.1)
    monkeypatch.setattr(snapshot_writer, "RETRY_S", 0.0)
    writer.take(3, state(3), {}, volatile=True)
    writer.close()
    assert published == [3]
    assert steps_of(directory) == [(1, 3)]


def test_two_buffers_do_and_one_says_what_is_needed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two of three buffers there was one failure, and then no snapshot for ever."""
    allocate = os.posix_fallocate
    room = 2

    def almost_full(descriptor: int, offset: int, length: int) -> None:
        if len(list(directory.glob("*.data"))) > room:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", almost_full)
    outcomes: list[Any] = []
    writer = SnapshotWriter(directory, context(), 1, on_outcome=outcomes.append)
    for step in range(1, 8):
        assert writer.due(step, 0.1)
        writer.take(step, state(step), {"step": step}, volatile=True)
        assert writer.wait(5)
    writer.close()
    assert outcomes == []
    assert steps_of(directory) == [(1, 7), (1, 6)]
    assert all((leaf == 6).all() for leaf in values_of(directory, 6))
    snapshot.sweep(directory)
    room = 1
    write_alone = SnapshotWriter(directory, context(2), 1, on_outcome=outcomes.append)
    for step in (1, 2):
        write_alone.take(step, state(step), {"step": step}, volatile=True)
    write_alone.close()
    (failed,) = outcomes
    assert "room for 1 of 3 buffers" in failed.error
    assert f"need {2 * writer.cost.bytes} bytes" in failed.error


def test_a_directory_swept_too_early_is_made_again(directory: Path) -> None:
    """The job goes on, and so must its snapshots."""
    writer = SnapshotWriter(directory, context(), 1)
    for step in range(1, 5):
        writer.take(step, state(step), {"step": step}, volatile=True)
    writer.wait(5)
    snapshot.sweep(directory)
    for step in range(5, 8):
        writer.take(step, state(step), {"step": step}, volatile=True)
    writer.close()
    assert steps_of(directory) == [(1, 7), (1, 6), (1, 5)]
    snapshot.load_pieces(directory, 1, 7)


def test_auto_takes_as_many_snapshots_as_cost_one_percent(directory: Path) -> None:
    """Snapshots are worth a hundredth of the time, on any machine and for any state."""
    outcomes: list[Any] = []
    writer = SnapshotWriter(directory, context(), "auto", on_outcome=outcomes.append)
    step_s, taken = 0.05, []
    for step in range(1, 400):
        if writer.due(step, step_s):
            taken.append(step)
            writer.take(step, state(step), {"step": step}, volatile=True)
            writer.wait(5)
    writer.close()
    cost = writer.cost
    intervals = [one for one in outcomes if isinstance(one, Interval)]
    assert intervals
    assert taken[:4] == [1, 2, 3, 4]  # until all buffers are there, which says nothing of the cost
    assert taken[-1] - taken[-2] in {one.every_steps for one in intervals}
    for one in intervals:
        assert one.cost_s <= 0.01 * step_s * one.every_steps
    assert cost.published == len(taken)
    assert cost.bytes >= STATE_BYTES - 64


def test_listing_costs_less_than_a_millisecond(directory: Path) -> None:
    """It lies on the path between a failure and the next step."""
    write(directory, 1, 2, 3)
    write(directory, 1, 2, 3, rank=1)
    durations = []
    for _ in range(20):
        started = time.perf_counter()
        assert len(snapshot.list_snapshots(directory)) == 6
        durations.append(time.perf_counter() - started)
    assert min(durations) < 1e-3


def test_a_leaf_above_two_gigabytes_comes_back(directory: Path) -> None:
    """One read gives 2 GiB at most: every snapshot of a larger leaf was "shorter than written" and
    rejected when it was needed. The file here is sparse.
    """
    write(directory, 1)
    path = next(directory.glob("g1-s1-*.json"))
    body = json.loads(path.read_bytes().partition(b"\n")[0])
    size = 2**31 + 4096
    with (directory / body["data"]).open("r+b") as file:
        file.truncate(0)
        file.truncate(size)
        file.seek(size - 1)
        file.write(b"\x07")
    checksum, block = 0, bytes(1 << 20)
    for _ in range(2**31 >> 20):
        checksum = zlib.crc32(block, checksum)
    checksum = zlib.crc32(bytes(4095) + b"\x07", checksum)
    leaf = {"name": "large", "form": f"uint8[{size}]", "index": [[0, size]], "offset": 0}
    body.update(bytes=size, leaves=[{**leaf, "bytes": size, "crc32": checksum}])
    text = json.dumps(body).encode()
    path.write_bytes(b"%s\n%08x\n" % (text, zlib.crc32(text)))
    found, _ = snapshot.load_pieces(directory, 1, 1)
    values = found.read("large", ((0, size),))
    assert (values[0], values[-1]) == (0, 7)
