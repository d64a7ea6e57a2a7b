"""The journal keeps every line or says which is damaged, and never leaves half of one behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor.errors import DiskError
from supervisor.record.journal import (
    ARCHIVES_KEPT,
    Journal,
    JournalDamaged,
    archives,
    decode,
    encode,
    last_segment,
    read_history,
    read_journal,
)

HEADER: dict[str, Any] = {"kind": "header", "schema": 1, "table": "t"}


def note(number: int) -> dict[str, Any]:
    return {"kind": "action", "action": f"a{number}", "outcome": "finished"}


def written(path: Path, actions: int = 3) -> Path:
    journal = Journal(path, epoch=7)
    journal.append([HEADER])
    for number in range(actions):
        journal.append([note(number)])
    journal.close()
    return path


def test_records_come_back_in_order_with_number_and_epoch(tmp_path: Path) -> None:
    """Everything that rebuilds or explains a run reads these lines."""
    records = list(read_journal(written(tmp_path / "j")))
    assert [record["seq"] for record in records] == [1, 2, 3, 4]
    assert {record["epoch"] for record in records} == {7}
    assert records[2]["action"] == "a1"


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A second daemon appends; it never writes over what the first one decided."""
    path = written(tmp_path / "j")
    journal = Journal(path, epoch=8)
    journal.append([note(9)])
    journal.close()
    records = list(read_journal(path))
    assert [record["seq"] for record in records] == [1, 2, 3, 4, 5]
    assert records[-1]["epoch"] == 8


def test_only_the_last_segment_is_kept_for_the_daemon(tmp_path: Path) -> None:
    """What an earlier run decided does not bind the next."""
    path = written(tmp_path / "j")
    journal = Journal(path, epoch=8)
    journal.append([HEADER, note(5)])
    journal.close()
    assert [r["kind"] for r in Journal(path, epoch=9).records] == ["header", "action"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_left_out_and_truncated(tmp_path: Path, cut: int) -> None:
    """A machine that loses power in the middle of a line loses that line and no other."""
    path = written(tmp_path / "j")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [r["seq"] for r in read_journal(path)] == [1, 2, 3]
    journal = Journal(path, epoch=8)
    assert journal.truncated == len(whole.splitlines(keepends=True)[-1]) - cut
    journal.append([note(4)])
    journal.close()
    assert [r["seq"] for r in read_journal(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", [1, 2, 3])
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path, line: int) -> None:
    """Skipping a damaged line would replay another story than the one that happened."""
    path = written(tmp_path / "j")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b"kind", b"kinb")
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalDamaged, match=f"line {line}: the checksum"):
        list(read_journal(path))
    with pytest.raises(JournalDamaged, match=f"line {line}: the checksum"):
        Journal(path, epoch=8)


def test_a_missing_line_is_noticed(tmp_path: Path) -> None:
    """A file whose lines are all whole may still lack one."""
    path = written(tmp_path / "j")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(JournalDamaged, match="line 3: sequence number 4, not 3"):
        list(read_journal(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"hello\n", "line 1: not JSON"),
        (b"{}\n", "line 1: not a line of a journal"),
        (encode({"seq": 1, "epoch": 1, **note(1)}), "line 1: a journal begins with a header"),
        (encode({"seq": 1, "epoch": 1, **HEADER, "schema": 99}), "schema 99; this version reads 1"),
        (encode({"seq": 1, "epoch": 1, "kind": "poem"}), "unknown kind 'poem'"),
    ],
)
def test_a_foreign_or_future_file_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    """What we did not write we do not continue, and do not truncate either."""
    path = tmp_path / "j"
    path.write_bytes(text)
    with pytest.raises(JournalDamaged, match=says):
        Journal(path, epoch=1)
    assert path.read_bytes() == text


def test_a_journal_that_is_not_there_says_so(tmp_path: Path) -> None:
    """`events` on a job that never ran."""
    with pytest.raises(DiskError, match="no daemon has run here"):
        list(read_journal(tmp_path / "j"))


def test_a_failed_append_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a block on a full disk must not be taken for a decision by the next daemon."""
    path = written(tmp_path / "j")
    before = path.read_bytes()
    journal = Journal(path, epoch=8)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:25], at))
    with pytest.raises(DiskError, match="cannot be written"):
        journal.append([note(4), note(5)])
    monkeypatch.undo()
    assert path.read_bytes() == before
    journal.append([note(6)])
    assert [r["seq"] for r in read_journal(path)] == [1, 2, 3, 4, 5]


def test_no_line_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    """`kill -9` of the daemon: what `append` returned from is in the file."""
    path = tmp_path / "j"
    code = (
        "import sys\nfrom pathlib import Path\nfrom supervisor.record.journal import Journal\n"
        "j = Journal(Path(sys.argv[1]), epoch=1)\n"
        "j.append([{'kind': 'header', 'schema': 1, 'table': 't'}])\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    j.append([{'kind': 'action', 'n': n}])\n"
        "    print(n, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(200)]
        child.send_signal(signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().splitlines()]
    found = [r["n"] for r in read_journal(path) if r["kind"] == "action"]
    assert found[: len(said)] == said
    assert len(found) - len(said) <= 1


def test_a_line_survives_its_own_encoding() -> None:
    """Floats, nested lists and text beyond ASCII come back as they were."""
    record = {"seq": 1, "kind": "move", "x": [0.1, 1e300, {"ä": None}], "y": "→"}
    assert decode(encode(record)) == record
    assert json.loads(encode(record))["crc"]


JOB: dict[str, Any] = {"kind": "job", "job": {}}


def test_a_journal_rolls_over_and_its_history_has_every_line_once(tmp_path: Path) -> None:
    """A job of months wrote a file that no editor opened, and no daemon read within its time."""
    path = written(tmp_path / "journal.jsonl")
    journal = Journal(path, epoch=8)
    for number in (10, 20):
        journal.roll(HEADER, JOB)
        journal.append([note(number)])
    journal.close()
    assert [number for number, _ in archives(path)] == [1, 2]
    assert [r["seq"] for r in read_journal(path)] == [8, 9, 10]
    assert [r["seq"] for r in read_history(path)] == list(range(1, 11))
    assert [r["seq"] for r in read_history(path, after=6)] == [7, 8, 9, 10]
    assert [r["kind"] for r in last_segment(path)] == ["header", "job", "action"]
    again = Journal(path, epoch=9)
    assert again.part == 3
    again.append([note(30)])
    assert [r["seq"] for r in read_history(path)] == list(range(1, 12))


def test_only_so_many_files_are_kept(tmp_path: Path) -> None:
    """What is bounded a file must be bounded in files too."""
    path = written(tmp_path / "journal.jsonl")
    other = tmp_path / "journal.old.jsonl"
    other.write_text("not ours")
    journal = Journal(path, epoch=8)
    for _ in range(ARCHIVES_KEPT + 3):
        journal.roll(HEADER, JOB)
    kept = [number for number, _ in archives(path)]
    assert kept == list(range(4, ARCHIVES_KEPT + 4))
    seqs = [r["seq"] for r in read_history(path)]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert other.read_text() == "not ours"


class Died(BaseException):
    """SIGKILL between two system calls."""


def test_a_roll_over_may_die_after_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is on the disk: no line is lost, none is there twice, and it goes on."""
    steps = ("open", "pwrite", "fsync", "replace", "close", "unlink")
    died = 0
    for survived in range(100):
        path = written(tmp_path / str(survived) / "journal.jsonl")
        journal = Journal(path, epoch=8)
        for _ in range(ARCHIVES_KEPT):
            journal.roll(HEADER, JOB)
        before = [r["seq"] for r in read_history(path)]
        left = [survived]

        def dying(real: Any, left: list[int] = left) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                if left[0] == 0:
                    raise Died
                left[0] -= 1
                return real(*arguments, **more)

            return call

        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                journal.roll(HEADER, JOB)
                over = True
            except Died:
                over, died = False, died + 1
        after = [r["seq"] for r in read_history(path)]
        assert after == list(range(after[0], after[-1] + 1)), survived
        assert after[-1] in (before[-1], before[-1] + 2), survived
        assert set(before[7:]) <= set(after), survived
        following = Journal(path, epoch=9)
        following.append([note(1)])
        following.roll(HEADER, JOB)
        assert last_segment(path)[0]["part"] == following.part
        ends = [r["seq"] for r in read_history(path)]
        assert ends == list(range(ends[0], after[-1] + 4)), survived
        if over:
            break
    assert died >= 12


def test_a_roll_over_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the journal goes on in the file that it has."""
    path = written(tmp_path / "journal.jsonl")
    journal = Journal(path, epoch=8)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:25], at))
    with pytest.raises(DiskError, match="cannot roll over"):
        journal.roll(HEADER, JOB)
    monkeypatch.undo()
    journal.append([note(6)])
    assert [r["seq"] for r in read_history(path)] == [1, 2, 3, 4, 5]
    assert journal.part == 1


def test_what_a_daemon_writes_whose_journal_is_anothers_goes_nowhere(tmp_path: Path) -> None:
    """A daemon was frozen between its look at the epoch and its write, and woke an hour later."""
    path = written(tmp_path / "journal.jsonl")
    old = Journal(path, epoch=8)
    new = Journal(path, epoch=9)
    new.append([note(100)])
    old.append([note(200), note(201)])
    new.append([note(101)])
    found = [r["action"] for r in read_journal(path) if r["epoch"] > 7]
    assert found == ["a100", "a101"]
    with pytest.raises(DiskError, match="another daemon's by now"):
        old.roll(HEADER, JOB)
    assert [r["action"] for r in read_journal(path) if r["epoch"] > 7] == found
