"""Restore points are read off the disk; what is damaged is passed over with its reason."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from supervisor.disk.restore_points import (
    QUARANTINED_MAX,
    RestorePoint,
    find,
    flaw,
    prune,
    quarantine,
    quarantine_above,
    survey,
    sweep_unfinished,
)

SAVE_AND_DIE = textwrap.dedent(
    """
    import os, pathlib, sys, time
    import numpy as np
    from trainer.state.checkpoint import Saver, directory_of

    run_dir = pathlib.Path(sys.argv[1])
    saver = Saver(run_dir, 1, print)

    def save(step, width):
        saver.save(step, {"w": np.ones((width, 512), np.float32)}, {"step": step, "generation": 1})

    save(2, 8)
    save(4, 8)
    assert saver.wait()
    save(6, 131072)  # 256 MB, so that its directory shows long before it is full
    while not directory_of(run_dir, 1, 6).exists():
        time.sleep(0.001)
    os._exit(9)
    """
)


def checkpoint(run_dir: Path, generation: int, step: int) -> Path:
    """What Orbax 0.12.8 leaves of a finished save (see the test with real ones)."""
    path = run_dir / "checkpoints" / f"generation-{generation}" / str(step)
    (path / "meta").mkdir(parents=True)
    (path / "state" / "d").mkdir(parents=True)
    handlers = {"item_handlers": {"meta": "Json", "state": "Standard"}}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(handlers))
    said = {"step": step, "generation": generation}
    (path / "meta" / "metadata").write_text(json.dumps(said))
    (path / "state" / "_METADATA").write_text('{"tree_metadata": {}}')
    (path / "state" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a")
    (path / "state" / "d" / "00ff").write_bytes(b"data")
    (path / "commit_success.txt").write_text("done")
    return path


def in_parts(run_dir: Path, generation: int, step: int, parts: int) -> Path:
    """What ranks leave that hold a state together."""
    path = run_dir / "checkpoints" / f"generation-{generation}" / str(step)
    for part in range(parts):
        whole = checkpoint(run_dir / "elsewhere" / str(part), generation, step)
        path.mkdir(parents=True, exist_ok=True)
        whole.rename(path / f"part-{part}-of-{parts}")
        (path / f"part-{part}-of-{parts}.verified").write_text("done")
    (path / "commit_success.txt").write_text("done")
    return path


def at(points: Sequence[RestorePoint]) -> list[tuple[int, int]]:
    return [(point.generation, point.step) for point in points]


def reason_for(run_dir: Path, path: Path) -> str:
    (one,) = [one for one in survey(run_dir)[1] if one.path == path]
    return one.reason


# --- finding ----------------------------------------------------------------------------------


def test_what_orbax_really_leaves_is_found_and_its_torn_save_is_not(tmp_path: Path) -> None:
    """`latest_step()` names saves that are not on disk yet (maxtext#5260); the disk has none."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", SAVE_AND_DIE, str(tmp_path)]
    ended = subprocess.run(
        run, check=False, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 9, ended.stderr
    points, rejected = survey(tmp_path)
    assert at(points) == [(1, 4), (1, 2)]
    assert (points[0].path / "state" / "manifest.ocdbt").exists()
    assert {one.path.name.split(".")[0] for one in rejected} == {"6"}
    assert rejected[0].unfinished
    assert sweep_unfinished(tmp_path) == [rejected[0].path]
    assert at(find(tmp_path)) == [(1, 4), (1, 2)]


def test_this_module_needs_neither_jax_nor_orbax() -> None:
    """The daemon stays small and starts fast."""
    code = "import sys, supervisor.disk.restore_points; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "orbax", "tensorstore", "numpy"} & set(loaded)


def test_the_newest_step_comes_first_and_the_newest_generation_of_it(tmp_path: Path) -> None:
    """A generation that started from an older step may have done the same step again."""
    for generation, step in [(1, 10), (2, 5), (3, 10), (2, 100), (1, 9)]:
        checkpoint(tmp_path, generation, step)
    assert at(find(tmp_path)) == [(2, 100), (3, 10), (1, 10), (1, 9), (2, 5)]


def test_a_generation_that_was_never_active_offers_nothing(tmp_path: Path) -> None:
    """Fencing is by name: a worker that woke up an hour later wrote where nobody looks."""
    checkpoint(tmp_path, 1, 10)
    checkpoint(tmp_path, 7, 99)
    points, rejected = survey(tmp_path, accepted={1, 2})
    assert at(points) == [(1, 10)]
    assert [one.reason for one in rejected] == ["generation 7 was never active"]


def test_a_run_without_checkpoints_has_no_restore_points(tmp_path: Path) -> None:
    """The very first start."""
    assert survey(tmp_path) == ([], [])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "commit_success.txt").unlink(), "never finished"),
        (lambda p: empty(p / "commit_success.txt"), "never finished"),
        (lambda p: (p / "_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA is missing"),
        (lambda p: (p / "_CHECKPOINT_METADATA").write_text("{"), "is damaged"),
        (lambda p: (p / "_CHECKPOINT_METADATA").write_text("[1]"), "no JSON object"),
        (
            lambda p: (p / "_CHECKPOINT_METADATA").write_text('{"item_handlers": null}'),
            "does not name the item meta",
        ),
        (lambda p: (p / "meta").rename(p / "elsewhere"), "item meta is missing"),
        (lambda p: (p / "state").rename(p / "elsewhere"), "item state is missing"),
        (lambda p: (p / "meta" / "metadata").unlink(), "meta/metadata is missing"),
        (lambda p: (p / "meta" / "metadata").write_text('{"step": 5'), "is damaged"),
        (lambda p: (p / "meta" / "metadata").write_text('{"step": 4}'), "says step 4"),
        (
            lambda p: (p / "meta" / "metadata").write_text('{"step": 5, "generation": 2}'),
            "says generation 2",
        ),
        (lambda p: (p / "meta" / "metadata").write_bytes(b"\xff\xfe"), "is damaged"),
        (lambda p: empty(p / "state" / "manifest.ocdbt"), "manifest.ocdbt is missing or empty"),
        (lambda p: (p / "state" / "_METADATA").unlink(), "_METADATA is missing"),
        (lambda p: (p / "state" / "d" / "00ff").unlink(), "holds no data"),
        (lambda p: (p / "state" / "d").rename(p / "state" / "e"), "holds no data"),
    ],
)
def test_damage_of_any_kind_is_a_rejection_with_its_reason(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """SIGKILL in a save or a deletion, a full disk, a curious hand: the previous one is used."""
    checkpoint(tmp_path, 1, 4)
    path = checkpoint(tmp_path, 1, 5)
    damage(path)
    assert at(find(tmp_path)) == [(1, 4)]
    assert reason in reason_for(tmp_path, path)


@pytest.mark.parametrize("name", ["7", "07", "7.orbax-checkpoint-tmp", "-3", "7.0", "notes"])
def test_an_empty_directory_is_no_checkpoint_whatever_its_name(tmp_path: Path, name: str) -> None:
    """Orbax takes any integer-named directory for a finished step unless told otherwise."""
    path = tmp_path / "checkpoints" / "generation-1" / name
    path.mkdir(parents=True)
    assert find(tmp_path) == []
    assert reason_for(tmp_path, path)


def test_strangers_are_told_and_left_alone(tmp_path: Path) -> None:
    """An editor's backup beside the checkpoints must neither stop a recovery nor be deleted."""
    checkpoint(tmp_path, 1, 4)
    root = tmp_path / "checkpoints"
    (root / "README").write_text("mine")
    (root / "generation-x").mkdir()
    (root / "generation-1" / "8").write_text("a file named like a step")
    os.mkfifo(root / "generation-1" / "9")
    points, rejected = survey(tmp_path)
    assert at(points) == [(1, 4)]
    assert {one.path.name for one in rejected} == {"README", "generation-x", "8", "9"}
    assert sweep_unfinished(tmp_path) == []
    assert (root / "README").read_text() == "mine"


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    """`ln -s /big/disk checkpoints`: workers saved through it, and no recovery found what they had.

    Looking, setting aside and retention all work on the disk behind the link.
    """
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    run_dir.mkdir()
    disk.mkdir()
    (run_dir / "checkpoints").symlink_to(disk)
    for step in (10, 20, 30, 40):
        checkpoint(run_dir, 1, step)
    assert at(find(run_dir)) == [(1, 40), (1, 30), (1, 20), (1, 10)]
    moved = quarantine(find(run_dir)[0], "a digest differs")
    assert moved.resolve().parent == disk / "quarantine"
    prune(run_dir, 2, {(1, 20), (1, 30)})
    assert at(find(run_dir)) == [(1, 30), (1, 20)]


def test_a_link_whose_disk_is_not_mounted_is_not_an_empty_directory(tmp_path: Path) -> None:
    """Starting over from the seed because a mount came late would lose the whole run."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(OSError, match="No such file"):
        find(tmp_path)


@pytest.mark.parametrize("linked", ["generation-1", "5", "commit_success.txt"])
def test_below_checkpoints_no_symbolic_link_is_followed(tmp_path: Path, linked: str) -> None:
    """What lies outside is not ours to trust, to move or to delete."""
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    path = checkpoint(run_dir, 1, 5)
    place = {
        "generation-1": path.parent,
        "5": path,
        "commit_success.txt": path / "commit_success.txt",
    }[linked]
    place.rename(outside)
    place.symlink_to(outside)
    points, rejected = survey(run_dir)
    assert points == []
    assert rejected
    sweep_unfinished(run_dir)
    assert outside.exists()


def test_a_disk_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting from the seed because a mount was slow would lose the whole run."""
    checkpoint(tmp_path, 1, 5)

    def refuse(self: Path) -> None:
        raise PermissionError(13, "refused", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError):
        find(tmp_path)


def test_one_that_is_deleted_while_it_is_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention ran beside the search of a recovery, which took that for a disk out of order."""
    old, new = checkpoint(tmp_path, 1, 10), checkpoint(tmp_path, 1, 20)
    look = Path.iterdir

    def deleted_meanwhile(self: Path) -> Iterator[Path]:
        if self == old / "state" / "d":
            shutil.rmtree(old)
        return look(self)

    monkeypatch.setattr(Path, "iterdir", deleted_meanwhile)
    points, rejected = survey(tmp_path)
    assert [point.path for point in points] == [new]
    assert [one.path for one in rejected] == [old]


# --- setting aside ----------------------------------------------------------------------------


def test_a_rejected_one_is_set_aside_with_its_reason_and_the_previous_one_is_next(
    tmp_path: Path,
) -> None:
    """A worker found a digest that does not match; nobody tries that one again."""
    checkpoint(tmp_path, 1, 4)
    checkpoint(tmp_path, 1, 5)
    moved = quarantine(find(tmp_path)[0], "the digest of w does not match")
    assert at(find(tmp_path)) == [(1, 4)]
    assert (moved / "commit_success.txt").exists()
    reason = moved.with_name(moved.name + ".reason.txt").read_text()
    assert reason == "the digest of w does not match\n"


def test_the_same_step_may_be_set_aside_twice(tmp_path: Path) -> None:
    """It was done again, and was bad again."""
    places = set()
    for _ in range(3):
        checkpoint(tmp_path, 1, 5)
        places.add(quarantine(find(tmp_path)[0], "bad"))
    assert len(places) == 3
    assert all(place.is_dir() for place in places)


def test_what_all_replicas_agreed_on_outlives_newer_ones(tmp_path: Path) -> None:
    """Compared more rarely than saved: else nothing is left to go back to if replicas differ."""
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path, 1, step)
    gone = prune(tmp_path, keep=2, verified={(1, 30), (1, 40)}, spared={(1, 10)})
    assert at(gone) == [(1, 20)]


def test_a_rollback_sets_aside_whatever_lies_above_its_target(tmp_path: Path) -> None:
    """Else later saves of the same steps are silently skipped (orbax#527)."""
    for generation, step in [(1, 10), (1, 20), (2, 30), (3, 20)]:
        checkpoint(tmp_path, generation, step)
    unfinished = tmp_path / "checkpoints" / "generation-3" / "40.orbax-checkpoint-tmp"
    unfinished.mkdir()
    moved = quarantine_above(tmp_path, 10, "rolled back to step 10: the loss diverged")
    assert at(find(tmp_path)) == [(1, 10)]
    assert len(moved) == 4
    assert not unfinished.exists()


def test_a_link_in_place_of_the_quarantine_is_refused(tmp_path: Path) -> None:
    """Moving checkpoints out of the run directory is not ours to do."""
    outside = tmp_path / "outside"
    outside.mkdir()
    run_dir = tmp_path / "run"
    checkpoint(run_dir, 1, 5)
    (run_dir / "checkpoints" / "quarantine").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        quarantine(find(run_dir)[0], "bad")
    assert at(find(run_dir)) == [(1, 5)]
    assert list(outside.iterdir()) == []


# --- retention --------------------------------------------------------------------------------


def test_retention_keeps_the_newest_verified_ones_and_all_above_them(tmp_path: Path) -> None:
    """The newest may not have been read back yet; it is not yet what one can rely on."""
    for step in (10, 20, 30, 40, 50):
        checkpoint(tmp_path, 1, step)
    gone = prune(tmp_path, keep=2, verified={(1, 10), (1, 20), (1, 30), (1, 40)})
    assert at(gone) == [(1, 20), (1, 10)]
    assert at(find(tmp_path)) == [(1, 50), (1, 40), (1, 30)]


def test_unverified_ones_never_push_out_a_verified_one(tmp_path: Path) -> None:
    """Five unverified saves and one verified: the verified one is all there is to rely on."""
    for step in (10, 20, 30, 40, 50, 60):
        checkpoint(tmp_path, 1, step)
    assert prune(tmp_path, keep=2, verified={(1, 10)}) == []
    assert len(find(tmp_path)) == 6


def test_verified_elsewhere_does_not_count_here(tmp_path: Path) -> None:
    """What the journal calls verified may have been quarantined or deleted since."""
    for step in (10, 20):
        checkpoint(tmp_path, 1, step)
    assert prune(tmp_path, keep=2, verified={(1, 20), (1, 30), (2, 20)}) == []
    assert len(find(tmp_path)) == 2


def test_keeping_fewer_than_two_is_refused(tmp_path: Path) -> None:
    """One checkpoint is none when it turns out to be damaged."""
    with pytest.raises(ValueError, match="at least 2"):
        prune(tmp_path, keep=1, verified=set())


def test_a_save_under_way_is_left_alone_by_retention(tmp_path: Path) -> None:
    """It has no commit marker yet, and its generation lives."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, 1, step)
    under_way = checkpoint(tmp_path, 1, 5)
    (under_way / "commit_success.txt").unlink()
    prune(tmp_path, keep=2, verified={(1, 10), (1, 20), (1, 30)})
    assert under_way.is_dir()
    assert sweep_unfinished(tmp_path, live={1}) == []
    assert sweep_unfinished(tmp_path) == [under_way]
    assert not under_way.exists()


def test_a_deletion_cut_short_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax deletes in place: a SIGKILL in there leaves half a step under its own name."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, 1, step)

    def killed(path: Path) -> None:
        (path / "state" / "d" / "00ff").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, keep=2, verified={(1, 10), (1, 20), (1, 30)})
    assert survey(tmp_path)[1] == []
    assert at(find(tmp_path)) == [(1, 30), (1, 20)]
    sweep_unfinished(tmp_path)
    assert list((tmp_path / "checkpoints" / "trash").iterdir()) == []


def test_deleting_never_follows_a_link_inside_a_checkpoint(tmp_path: Path) -> None:
    """Somebody moved the large files to another disk and left links."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    run_dir = tmp_path / "run"
    for step in (10, 20, 30):
        checkpoint(run_dir, 1, step)
    (run_dir / "checkpoints" / "generation-1" / "10" / "more").symlink_to(outside)
    assert at(prune(run_dir, keep=2, verified={(1, 20), (1, 30)})) == [(1, 10)]
    assert (outside / "precious").read_text() == "data"


def test_the_quarantine_does_not_fill_the_disk(tmp_path: Path) -> None:
    """A run that diverges once an hour for a month."""
    for step in range(QUARANTINED_MAX + 3):
        checkpoint(tmp_path, 1, step)
        quarantine(find(tmp_path)[0], "bad")
    prune(tmp_path, keep=2, verified=set())
    held = list((tmp_path / "checkpoints" / "quarantine").iterdir())
    assert sum(one.is_dir() for one in held) == QUARANTINED_MAX
    assert sum(one.is_file() for one in held) == QUARANTINED_MAX + 3


def test_a_checkpoint_in_parts_counts_when_all_of_them_are_whole(tmp_path: Path) -> None:
    """One rank's part on a disk that was lost must not be found out while workers wait."""
    whole = in_parts(tmp_path, 1, 5, parts=2)
    lacking = in_parts(tmp_path, 1, 6, parts=3)
    (lacking / "part-1-of-3").rename(tmp_path / "lost")
    damaged = in_parts(tmp_path, 1, 7, parts=2)
    (damaged / "part-1-of-2" / "state" / "manifest.ocdbt").unlink()
    unfinished = in_parts(tmp_path, 1, 8, parts=2)
    (unfinished / "commit_success.txt").unlink()
    assert at(find(tmp_path)) == [(1, 5)]
    assert find(tmp_path)[0].path == whole
    assert "part-1-of-3 is missing" in reason_for(tmp_path, lacking)
    assert "state/manifest.ocdbt is missing" in reason_for(tmp_path, damaged)
    assert "never finished" in reason_for(tmp_path, unfinished)
    assert sweep_unfinished(tmp_path) == [unfinished]


def test_a_committed_checkpoint_that_cannot_be_used_has_a_reason(tmp_path: Path) -> None:
    """A flipped bit in its metadata made it invisible, and nobody was told why."""
    path = checkpoint(tmp_path, 1, 10)
    assert flaw(tmp_path, 1, 10) == ""
    (path / "_CHECKPOINT_METADATA").write_text("{")
    assert "_CHECKPOINT_METADATA is damaged" in flaw(tmp_path, 1, 10)
    assert flaw(tmp_path, 1, 20) == "it is not on the disk any more"
