"""The order of samples, exact after any resume in any world; and what is kept of tokenised data."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataSettings
from trainer.data import store as stores
from trainer.data.cache_files import read_arrays, read_table, write_arrays, write_table
from trainer.data.corpus import hold_out
from trainer.data.encoding import Part
from trainer.data.files import was_tokenised
from trainer.data.rows import PackedRows
from trainer.data.source import Source, open_source
from trainer.data.store import DataDamaged, open_or_build
from trainer.data.tokenizer import BytesTokenizer, Encoded, Passage
from trainer.data.windows import Windows
from trainer.host.disk_errors import DataUnavailable
from trainer.prepare_data import main as prepare
from trainer.process.failures import describe
from trainer.settings import SettingsError

GOLDEN = [12, 71, 4, 91, 77, 93]


class Ended(BytesTokenizer):
    """Bytes with an end of text."""

    closing = (256,)


class Counting:
    """As that, in int32, and counts how often it is asked."""

    vocabulary = 257
    closing = (256,)
    reach = 0
    fingerprint = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def encode_many(self, passages: Sequence[Passage]) -> list[Encoded]:
        self.asked += len(passages)
        return Ended().encode_many(passages)


def open_(folder: Path, tokenizer: Any = None, *, seed: int = 7, **more: Any) -> Source:
    values = {"path": ("data.jsonl",), "batch_size": 4, "sequence_length": 24, **more}
    given: Any = Counting() if tokenizer is None else tokenizer
    return open_source(
        DataSettings.model_validate(values), given, folder, seed=seed, held_out_batches=2
    )


def write_pairs(folder: Path, count: int = 120) -> None:
    rows = [{"prompt": f"{n}*{n}=", "completion": str(n * n)} for n in range(count)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(400)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path)
    write_text(tmp_path)
    return tmp_path


KINDS: dict[str, dict[str, Any]] = {
    "documents": {},
    "none": {"packing": "none"},
    "stream": {"packing": "stream"},
    "text": {"path": ("text.txt",)},
}


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_rows_after_a_resume_are_those_of_an_undisturbed_run_on_any_number_of_workers(
    folder: Path, more: dict[str, Any], workers: int
) -> None:
    """Data that repeats or is skipped after a resume changes the result (ray#37633)."""
    undisturbed = open_(folder, **more)
    steps = range(40)  # over the end of an epoch
    ids = [undisturbed.sample_ids(step) for step in steps]
    whole = [undisturbed.train_rows(step, slice(0, 4)) for step in steps]
    share = 4 // workers
    for step in (0, 1, 13, 39):
        resumed = open_(folder, **more)
        assert resumed.sample_ids(step) == ids[step]
        parts = [
            resumed.train_rows(step, slice(rank * share, (rank + 1) * share))
            for rank in range(workers)
        ]
        for name, values in whole[step].items():
            assert np.array_equal(np.concatenate([part[name] for part in parts]), values)


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_every_row_comes_once_an_epoch_in_another_order(folder: Path, more: dict[str, Any]) -> None:
    """A shuffle that repeats itself lets the model learn the order."""
    source = open_(folder, **more)
    assert isinstance(source, PackedRows)
    rows = source.facts()["data_rows"]
    drawn = [one for step in range(2 * rows) for one in source.sample_ids(step)]
    epochs = [drawn[index * rows : (index + 1) * rows] for index in range(4)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert open_(folder, seed=8, **more).sample_ids(0) != source.sample_ids(0)


def test_the_order_is_the_same_for_ever(folder: Path) -> None:
    """A library that changes its shuffle would silently change every resumed run."""
    source = open_(folder, packing="none", batch_size=6)
    assert source.facts()["data_rows"] == 114
    assert source.sample_ids(3) == GOLDEN


def test_the_position_names_epoch_and_samples(folder: Path) -> None:
    """Users of Ray asked for their epoch in every checkpoint."""
    source = open_(folder, packing="none")
    assert source.position(0) == {"epoch": 0, "samples": 0, "rows_an_epoch": 114}
    assert source.position(57) == {"epoch": 2, "samples": 228, "rows_an_epoch": 114}


def text_of(ids: np.ndarray[Any, Any]) -> str:
    return "".join("|" if one == 256 else chr(one) for one in ids.tolist())


def test_packed_rows_hold_whole_documents_and_only_completions_count(folder: Path) -> None:
    """Attention must not cross documents, nor a prompt be learned."""
    source = open_(folder)
    seen = set()
    for step in range(source.facts()["data_rows"] // 4):
        batch = source.train_rows(step, slice(0, 4))
        assert batch["tokens"].dtype == np.int32
        assert batch["tokens"].shape == batch["segments"].shape == (4, 25)
        assert batch["weights"].dtype == np.float32
        for tokens, segments, weights in zip(
            batch["tokens"], batch["segments"], batch["weights"], strict=True
        ):
            assert weights[segments[1:] == 0].sum() == 0
            for number in range(1, segments.max() + 1):
                inside = segments == number
                document = text_of(tokens[inside])
                prompt, _, completion = document.partition("=")
                root = int(prompt.split("*")[0])
                assert completion == f"{root * root}|"
                learned = tokens[1:][inside[1:] & (weights > 0)]
                assert text_of(learned) == completion
                seen.add(root)
    assert len(seen) > 100


def test_padded_rows_need_no_segments_and_a_stream_of_text_no_weights(folder: Path) -> None:
    """What says nothing is left out: it would be computed with in every step."""
    padded = open_(folder, packing="none").train_rows(0, slice(0, 1))
    assert set(padded) == {"tokens", "weights"}
    assert text_of(padded["tokens"][0]).rstrip("\0").endswith("|")
    stream = open_(folder, path=("text.txt",)).train_rows(0, slice(0, 1))
    assert set(stream) == {"tokens"}
    assert text_of(stream["tokens"][0]) in (folder / "text.txt").read_text()


def test_text_for_a_model_of_bytes_takes_the_quick_way(folder: Path) -> None:
    """The default job starts without a cache, and without the packages of the extra."""
    source = open_(folder, BytesTokenizer(), path=("text.txt",))
    assert isinstance(source, Windows)
    assert source.train_rows(0, slice(0, 2))["tokens"].dtype == np.uint8
    assert not (folder / "runs").exists()
    starts = source.sample_ids(5)
    text = (folder / "text.txt").read_bytes()
    rows = source.train_rows(5, slice(0, 4))["tokens"]
    assert [row.tobytes() for row in rows] == [text[start : start + 25] for start in starts]
    assert source.position(3)["samples"] == 12


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=12),
    length=st.integers(2, 9),
    packing=st.sampled_from(["documents", "none", "stream"]),
)
def test_every_token_that_counts_weighs_one_in_every_epoch(
    documents: list[list[bool]], length: int, packing: Any
) -> None:
    """Weights that are off by one train a model on the questions instead of the answers."""
    counts = [one for document in documents for one in document]
    names = list(range(1, len(counts) + 1))  # every token has an id of its own; 0 is padding
    firsts, parts = set(), [Part(tokens=[1, 1], held_out=True)]
    for document in documents:
        tokens, names = names[: len(document)], names[len(document) :]
        firsts.add(tokens[0])
        parts.append(Part(tokens=tokens, counts=document))
    size = len(counts)
    targets = {token for token in range(1, size + 1) if counts[token - 1]}
    if packing == "stream":
        targets &= set(range(2, 2 + (size - 1) // length * length))
        parts[0] = Part(tokens=[1] * (length + 1), held_out=True)
    else:
        targets -= firsts
    values = {"batch_size": 1, "sequence_length": length}
    with tempfile.TemporaryDirectory() as folder:
        store = open_or_build(Path(folder), "key", size + 1, lambda: iter(parts), lambda: None)
        settings_ = DataSettings.model_validate(values)
        make = functools.partial(
            PackedRows, store, packing, settings_, seed=1, held_out_batches=1, byte_tokens=False
        )
        if not targets:
            with pytest.raises(SettingsError, match="make 0 rows"):
                make()
            return
        source = make()
        for epoch in range(2):
            weighed: dict[int, float] = dict.fromkeys(range(size + 1), 0.0)
            rows = source.facts()["data_rows"]
            for step in range(epoch * rows, (epoch + 1) * rows):
                batch = source.train_rows(step, slice(0, 1))
                weights = batch.get("weights", np.ones((1, length)))[0]
                for token, weight in zip(batch["tokens"][0, 1:].tolist(), weights, strict=True):
                    weighed[token] += float(weight)
            assert weighed == {token: float(token in targets) for token in range(size + 1)}


# ------------------------------------------------------------------------------- held out


@settings(deadline=None)
@given(count=st.integers(0, 200), fraction=st.floats(0.01, 0.5))
def test_the_fraction_of_documents_is_held_out_and_one_at_least(
    count: int, fraction: float
) -> None:
    """Without a held-out document there is nothing to evaluate on."""
    found = list(hold_out((Part(tokens=[number]) for number in range(count)), fraction))
    assert [part.tokens for part in found] == [[number] for number in range(count)]
    held_out = sum(part.held_out for part in found)
    assert held_out == max(min(count, 1), int(count * fraction))


def test_held_out_rows_are_never_trained_on_and_stay_the_same(folder: Path) -> None:
    """An evaluation that moves around cannot be compared with the one before."""
    source = open_(folder, packing="none")
    rows = source.facts()["data_rows"]
    trained = {
        text_of(row)
        for step in range(rows // 4 + 1)
        for row in source.train_rows(step, slice(0, 4))["tokens"]
    }
    held_out = [source.held_out_rows(index, slice(0, 4))["tokens"] for index in range(2)]
    texts = [text_of(row) for row in np.concatenate(held_out)]
    assert not trained & set(texts)
    assert len({text for text in texts if text.strip("\0")}) == 6  # the rest fills the batch
    assert np.array_equal(source.held_out_rows(1, slice(2, 4))["tokens"], held_out[1][2:])


def test_held_out_data_of_ones_own_take_the_place_of_the_fraction(folder: Path) -> None:
    """Most public data sets come with a validation file."""
    (folder / "valid.jsonl").write_text('{"prompt": "7*7=", "completion": "49"}\n')
    source = open_(folder, packing="none", held_out_path="valid.jsonl")
    assert source.facts()["data_documents"] == 120
    rows = source.held_out_rows(0, slice(0, 4))["tokens"]
    assert [text_of(row).rstrip("\0") for row in rows] == ["7*7=49|", "", "", ""]
    with pytest.raises(SettingsError, match="is trained on as well"):
        open_(folder, held_out_path="data.jsonl")


# ------------------------------------------------------------------------------- what is kept


def test_a_restart_tokenises_nothing_again(folder: Path) -> None:
    """A recovery within a fraction of a second cannot wait for gigabytes of text."""
    first, second = Counting(), Counting()
    facts = open_(folder, first).facts()
    assert first.asked == 120
    assert open_(folder, second).facts() == facts
    assert open_(folder, second, sequence_length=32, packing="none").facts() != facts
    assert second.asked == 0


def test_other_data_are_other_facts_and_a_touched_file_is_not(folder: Path) -> None:
    """A resume says what has changed; a copied file has not."""
    digest = open_(folder).facts()["data_sha256"]
    os.utime(folder / "data.jsonl", (1, 1))
    assert open_(folder).facts()["data_sha256"] == digest
    write_pairs(folder, 121)
    assert open_(folder).facts()["data_sha256"] != digest


def only_store(folder: Path) -> Path:
    (meta,) = (folder / "runs" / ".data").glob("*/store.json")
    return meta.parent


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_named_and_the_next_start_makes_the_data_anew(folder: Path) -> None:
    """Damaged tokens would be trained on without a word."""
    undisturbed = open_(folder).train_rows(0, slice(0, 4))
    damage(only_store(folder) / "train.tokens")
    with pytest.raises(DataDamaged, match=r"train\.tokens, byte 0 and after: is not what was"):
        open_(folder).train_rows(0, slice(0, 4))
    tokenizer = Counting()
    assert np.array_equal(
        open_(folder, tokenizer).train_rows(0, slice(0, 4))["tokens"], undisturbed["tokens"]
    )
    assert tokenizer.asked == 120


@pytest.mark.parametrize("name", ["store.json", "train.tokens", "train.ends"])
def test_a_store_that_lost_a_file_or_half_of_it_is_made_anew(folder: Path, name: str) -> None:
    """A full disk or a careless hand; the files of the user are still there."""
    wanted = open_(folder).facts()
    file = only_store(folder) / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    tokenizer = Counting()
    assert open_(folder, tokenizer).facts() == wanted
    assert tokenizer.asked == 120


def test_flipped_ends_of_documents_are_noticed_when_the_store_is_opened(folder: Path) -> None:
    """Documents that end elsewhere would be cut in two."""
    wanted = open_(folder).train_rows(0, slice(0, 4))
    file = only_store(folder) / "train.ends"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    tokenizer = Counting()
    found = open_(folder, tokenizer).train_rows(0, slice(0, 4))
    assert np.array_equal(found["tokens"], wanted["tokens"])
    assert tokenizer.asked == 120


def test_a_damaged_plan_is_made_anew(folder: Path) -> None:
    """It is derived from the tokens, so that there is nothing to lose."""
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    damage(next(only_store(folder).glob("train-documents-*.plan")))
    assert np.array_equal(open_(folder).train_rows(3, slice(0, 4))["tokens"], wanted)


@pytest.mark.parametrize("spoil", [b"", b"\0" * 40, b"no array", None])
@pytest.mark.parametrize(
    "name",
    [
        *("store.json", "train.tokens", "train.tokens.sums", "train.ends", "held_out.counts.sums"),
        "train-documents-24-2.plan",
    ],
)
def test_a_damaged_or_empty_file_of_the_cache_is_made_anew(
    folder: Path, name: str, spoil: bytes | None
) -> None:
    """A power cut left files without content, and each start ended in EOFError until they were
    deleted by hand."""
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    file = only_store(folder) / name
    if spoil is None:
        damage(file)
    else:
        file.write_bytes(spoil)
    try:
        found = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    except DataDamaged:  # seen when a row is read, and set aside
        found = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    assert np.array_equal(found, wanted)


def test_a_plan_of_other_tokens_is_not_used(folder: Path) -> None:
    """Rows beyond the end of the tokens are no rows."""
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    plan = next(only_store(folder).glob("train-documents-*.plan"))
    kept = dict(read_arrays(plan, start="<i8", length="<i8", first="<i8"))
    write_arrays(plan, {**kept, "start": kept["start"] + 100_000})
    assert np.array_equal(open_(folder).train_rows(3, slice(0, 4))["tokens"], wanted)


@pytest.mark.parametrize("dtype", ["O", "|O", "<f4", "V8", 5, None, ["<i4"], "<i8"])
def test_a_type_that_no_store_has_is_never_mapped(folder: Path, dtype: object) -> None:
    """Tokens of type "O" are pointers out of a file: the process died of SIGSEGV."""
    wanted = open_(folder).train_rows(0, slice(0, 4))["tokens"]
    meta = only_store(folder) / "store.json"
    write_table(meta, {**read_table(meta), "dtype": dtype})
    tokenizer = Counting()
    found = open_(folder, tokenizer).train_rows(0, slice(0, 4))["tokens"]
    assert np.array_equal(found, wanted)
    assert tokenizer.asked == 120


@pytest.mark.parametrize("name", ["", "store.json", "train.tokens", "train.ends"])
def test_a_cache_that_others_could_have_written_is_refused(folder: Path, name: str) -> None:
    """On a shared machine anybody may be first to make a folder of that name."""
    open_(folder)
    file = only_store(folder) / name
    file.chmod(file.stat().st_mode | 0o020)
    with pytest.raises(SettingsError, match=r"cache: others than its owner may write to .*chmod"):
        open_(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "store.json", "train.tokens", "train.ends"])
def test_a_cache_of_another_user_is_refused(folder: Path, name: str) -> None:
    """What they put there would be trained on."""
    open_(folder)
    os.chown(only_store(folder) / name, 12345, -1)
    with pytest.raises(SettingsError, match=r"cache: .* belongs to the user 12345"):
        open_(folder)


def test_tokenised_data_are_for_their_owner_only(folder: Path) -> None:
    """They are the texts in another form."""
    open_(folder)
    store = only_store(folder)
    assert store.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in store.iterdir())


# ------------------------------------------------------------------------------- files that go


def failing(method: str, number: int, name: str) -> Any:
    """A method of `Path` that fails with this errno for files of that name."""
    true = getattr(Path, method)

    def disturbed(self: Path, *more: Any, **named: Any) -> Any:
        if self.name == name:
            raise OSError(number, os.strerror(number), str(self))
        return true(self, *more, **named)

    return disturbed


def test_the_cache_serves_when_the_files_were_moved_away(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that had tokenised everything failed at its next start for want of the raw text."""
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    (folder / "data.jsonl").rename(folder / "elsewhere.jsonl")
    tokenizer = Counting()
    found = open_(folder, tokenizer).train_rows(3, slice(0, 4))["tokens"]
    assert np.array_equal(found, wanted)
    assert tokenizer.asked == 0
    assert "data_served_from_cache" in capsys.readouterr().out
    asked = DataSettings(path=("data.jsonl",), batch_size=4, sequence_length=24)
    assert was_tokenised(asked, folder)
    assert not was_tokenised(asked.model_copy(update={"text_key": "other"}), folder)
    with pytest.raises(SettingsError, match="does not exist"):
        open_(folder, text_key="other")


def test_the_cache_serves_when_a_whole_folder_is_gone(folder: Path) -> None:
    """Its name alone does not tell what was in it."""
    (folder / "data").mkdir()
    (folder / "data.jsonl").rename(folder / "data" / "a.jsonl")
    wanted = open_(folder, path=("data",)).train_rows(3, slice(0, 4))["tokens"]
    shutil.rmtree(folder / "data")
    found = open_(folder, path=("data",)).train_rows(3, slice(0, 4))["tokens"]
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
def test_a_file_system_that_stumbles_is_no_mistake_of_the_user(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that restarted for a second ended the job for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing("stat", number, "data.jsonl"))
        with pytest.raises((DataUnavailable, OSError)) as caught:
            open_(folder)
    assert not describe(caught.value).user
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    monkeypatch.setattr(Path, "stat", failing("stat", number, "data.jsonl"))
    assert np.array_equal(open_(folder).train_rows(3, slice(0, 4))["tokens"], wanted)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_what_only_a_person_can_change_is_a_mistake(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying again for an hour does not give a right to read."""
    monkeypatch.setattr(Path, "open", failing("open", number, "data.jsonl"))
    with pytest.raises(SettingsError, match=r"data\.jsonl: cannot be read as"):
        open_(folder)


def test_an_input_that_is_refused_leaves_no_file_open(folder: Path) -> None:
    """A rank whose disk stumbles tries for an hour: each attempt left four files open."""
    (folder / "data.jsonl").write_text("not JSON\n")
    with pytest.raises(SettingsError, match="is not JSON") as refused:
        open_(folder)
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(folder)], refused


def test_a_plan_that_cannot_be_kept_is_made_at_every_start(folder: Path) -> None:
    """A cache that somebody else has prepared may be open for reading only."""
    wanted = open_(folder).train_rows(3, slice(0, 4))["tokens"]
    kept = next(only_store(folder).glob("train-documents-*.plan"))
    kept.unlink()
    kept.mkdir()  # nothing can be written in its place
    assert np.array_equal(open_(folder).train_rows(3, slice(0, 4))["tokens"], wanted)
    assert kept.is_dir()


def write_slowly(cache: Path, wrote: Path) -> None:
    def parts() -> Any:
        (wrote / str(os.getpid())).touch()
        time.sleep(0.3)
        yield Part(tokens=[1, 2, 3])

    found = open_or_build(cache, "key", 256, parts, lambda: None)
    assert len(found.train) == 3


def die_writing(cache: Path) -> None:
    def parts() -> Any:
        yield Part(tokens=[1, 2, 3])
        os._exit(9)

    open_or_build(cache, "key", 256, parts, lambda: None)


def test_of_several_processes_one_tokenises_and_the_others_wait(tmp_path: Path) -> None:
    """Eight ranks that start together must not do the same work eight times."""
    (tmp_path / "wrote").mkdir()
    arguments = (tmp_path / "cache", tmp_path / "wrote")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "wrote").iterdir())) == 1


def test_a_writer_that_dies_is_followed_by_the_next(tmp_path: Path) -> None:
    """A worker may be killed at any line, also while it tokenises."""
    cache = tmp_path / "cache"
    process = multiprocessing.get_context("spawn").Process(target=die_writing, args=(cache,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert (cache / "key.partial").is_dir()
    parts = iter([Part(tokens=[4, 5])])
    found = open_or_build(cache, "key", 256, lambda: parts, lambda: None)
    assert found.train.ids(0, 2).tolist() == [4, 5]
    assert not (cache / "key.partial").exists()


def test_whoever_waits_is_told_that_it_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """Tokenising for minutes is progress, not a hang."""
    monkeypatch.setattr(stores, "_PATIENCE_S", 0.0)
    ticks: list[None] = []
    open_or_build(
        tmp_path / "cache",
        "key",
        256,
        lambda: iter([Part(tokens=[1])] * 5),
        lambda: ticks.append(None),
    )
    assert len(ticks) >= 4


def test_data_can_be_prepared_ahead_of_a_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gigabytes take longer to tokenise than a worker may take to start."""
    config = folder / "job.toml"
    config.write_text('[trainer.data]\npath = "data.jsonl"\nsequence_length = 24\n')
    assert prepare(["--config", str(config), "--set", "trainer.data.batch_size=4"]) == 0
    said = capsys.readouterr().out
    source = open_(folder, BytesTokenizer())
    assert f"data_sha256: {source.facts()['data_sha256']}" in said
    assert len(list((folder / "runs/.data").glob("*/store.json"))) == 1
    assert prepare(["--config", str(config), "--set", "trainer.data.path=gone"]) == 2
    assert "gone does not exist" in capsys.readouterr().err
    assert prepare(["--set", "trainer.task=mine:Mine"]) == 2
    assert "opens its data itself" in capsys.readouterr().err


# ------------------------------------------------------------------------------- what is refused


def no_room(folder: Path) -> None:
    (folder / "runs").write_text("a file where the cache should be")


def too_small(folder: Path) -> None:
    write_pairs(folder, 3)


def empty(folder: Path) -> None:
    (folder / "data.jsonl").write_text("")


def gone(folder: Path) -> None:
    (folder / "data.jsonl").unlink()


@pytest.mark.parametrize(
    ("disturb", "more", "complaint"),
    [
        (no_room, {}, r"\[trainer\.data\] cache: .*runs.* cannot be used"),
        (
            too_small,
            {"packing": "none"},
            "make 2 rows of sequence_length = 24, and one step takes 4",
        ),
        (empty, {}, "holds no records"),
        (gone, {}, "does not exist"),
        (
            lambda _: None,
            {"path": (".",), "format": "parquet"},
            r"holds no file that ends in \.parq",
        ),
        (lambda _: None, {"path": ("data.jsonl", "text.txt")}, "holds jsonl and text"),
        (lambda _: None, {"path": ("a:b",)}, 'set format = "ray"'),
        (lambda _: None, {"path": ("text.txt",), "format": "dataset"}, "save_to_disk has made"),
        (lambda _: None, {"text_key": "no", "path": "text.jsonl"}, "does not exist"),
    ],
)
def test_what_cannot_be_used_is_named_before_the_first_step(
    folder: Path, disturb: Callable[[Path], None], more: dict[str, Any], complaint: str
) -> None:
    """No retry can change it, so the message must."""
    disturb(folder)
    with pytest.raises(SettingsError, match=complaint) as caught:
        open_(folder, **more)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"format": "jsonl"}, "name files or folders in path"),
        ({"format": "ray", "path": ["train.jsonl"]}, 'write path = "module:function"'),
    ],
)
def test_settings_that_contradict_each_other_are_refused_when_they_are_read(
    values: dict[str, Any], complaint: str
) -> None:
    """`check` should find it, not the worker."""
    with pytest.raises(ValueError, match=complaint):
        DataSettings.model_validate(values)


def test_the_default_job_imports_nothing_of_the_extra() -> None:
    """It must start quickly, and on a machine that has none of it."""
    code = """
import sys
from trainer.config import DataSettings
from trainer.data.source import open_source
from trainer.data.tokenizer import BytesTokenizer, Encoded, Passage
source = open_source(DataSettings(), BytesTokenizer(), "/", seed=0, held_out_batches=1)
assert source.train_rows(0, slice(0, 2))["tokens"].shape == (2, 129)
found = {"grain", "pyarrow", "tokenizers", "jax"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
