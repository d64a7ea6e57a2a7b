"""What `check` finds missing before a start would, and what it must not complain of."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from supervisor.cluster.own_servers import head_cpus
from supervisor.config import Settings
from supervisor.console import preflight
from supervisor.console.preflight import problems, why_no_snapshots, with_address
from trainer.settings import SettingsError


def found(config_dir: Path, **sections: Any) -> list[str]:
    return [*problems(Settings.model_validate(sections), config_dir)]


def the_one(config_dir: Path, **sections: Any) -> str:
    """The only problem that there is."""
    (problem,) = found(config_dir, **sections)
    return problem


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """A port that accepts connections; a thread of the kernel's, no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_defaults_are_fine_anywhere(tmp_path: Path) -> None:
    """A check that cries wolf is switched off."""
    assert found(tmp_path) == []


def test_a_module_that_is_not_there_is_named_with_the_place(tmp_path: Path) -> None:
    """It took half a minute and a Ray of its own to say so, with status 4."""
    said = the_one(tmp_path, trainer={"task": "nope:Line"})
    assert "trainer.task = 'nope:Line'" in said
    assert f"no module 'nope' in {tmp_path}" in said


def test_a_class_that_a_module_does_not_have_is_named_with_the_nearest(tmp_path: Path) -> None:
    """The commonest slip after a rename."""
    (tmp_path / "mine.py").write_text("class Lines: ...\n")
    said = the_one(tmp_path, trainer={"task": "mine:Line"})
    assert f"{tmp_path / 'mine.py'} defines no 'Line'; did you mean mine:Lines?" in said


@pytest.mark.parametrize("file", ["mine.py", "./mine.py", "/somewhere/mine"])
def test_a_file_in_place_of_a_module_is_named_with_the_module(tmp_path: Path, file: str) -> None:
    """`there is no module 'mine.py'`, though mine.py lay there."""
    (tmp_path / "mine.py").write_text("class Line: ...\n")
    said = the_one(tmp_path, trainer={"task": f"{file}:Line"})
    assert "must name a module, not a file; did you mean mine:Line?" in said


def test_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    """No retry changes it, and no Ray is needed to see it."""
    (tmp_path / "mine.py").write_text("x = 1\nclass Line(:\n")
    assert f"{tmp_path / 'mine.py'}:2: " in the_one(tmp_path, trainer={"task": "mine:Line"})


@pytest.mark.parametrize(
    "text",
    [
        "class Line: ...",
        "def Line(worker): ...",
        "Line = object",
        "from somewhere import Line",
        "from somewhere import Other as Line",
        "from somewhere import *",
        "def __getattr__(name): ...",
        "globals()['Line'] = 1",
        "if True:\n    class Line: ...",
    ],
)
def test_every_way_to_define_a_task_is_accepted(tmp_path: Path, text: str) -> None:
    """What a module may hold is known when it runs; only what cannot be there is refused."""
    package = tmp_path / "mine" / "tasks"
    package.mkdir(parents=True)
    (package / "line.py").write_text(text)
    assert found(tmp_path, trainer={"task": "mine.tasks.line:Line"}) == []


def test_data_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    """A typing error in a path cost a start of Ray, two workers and a status for schedulers."""
    said = the_one(tmp_path, trainer={"data": {"path": ["texts"]}})
    assert "[trainer.data] path" in said
    assert str(tmp_path / "texts") in said


def test_a_cache_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    """The workers found it, half a minute later, and the job ended with status 4."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "a_file").touch()
    data = {"path": ["pairs.jsonl"], "cache": "a_file/cache"}
    said = the_one(tmp_path, trainer={"data": data})
    assert f"[trainer.data] cache: {tmp_path}/a_file/cache cannot be used: Not a dir" in said
    assert found(tmp_path, trainer={"data": {**data, "cache": "new/cache"}}) == []
    text = {"path": ["a_file"], "cache": "a_file/cache"}  # what is not tokenised needs no cache
    assert found(tmp_path, trainer={"data": text}) == []


def test_a_task_of_ones_own_need_not_have_the_data_of_the_builtin_one(tmp_path: Path) -> None:
    """What nothing reads may be anything."""
    (tmp_path / "mine.py").write_text("class Line: ...")
    assert found(tmp_path, trainer={"task": "mine:Line", "data": {"path": ["nowhere"]}}) == []


def test_more_workers_than_cpus_is_said_with_both_ways_out(tmp_path: Path) -> None:
    """Ray says "needs 8 CPUs, the cluster has 2" after eleven seconds, and no setting."""
    workers = head_cpus() * 2
    data = {"batch_size": workers}
    said = the_one(tmp_path, cluster={"workers": workers}, trainer={"data": data})
    assert f"cluster.workers = {workers} x cluster.cpus_per_worker = 1" in said
    assert f"this machine has {head_cpus()}" in said
    assert "cpus_per_worker to 0.5 or less" in said
    cluster = {"workers": workers, "cpus_per_worker": 0.5}
    assert found(tmp_path, cluster=cluster, trainer={"data": data}) == []


def test_gpus_that_are_not_there_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES hides what the machine has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = the_one(tmp_path, cluster={"gpus_per_worker": 1})
    assert "needs 2 GPUs, this machine has 0" in said


def test_a_name_that_hides_a_module_from_rays_workers_is_refused_in_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times "slot 1 has died: it could not be created: ImportError", for a trainer.py."""
    (tmp_path / "trainer.py").touch()
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "__init__.py").touch()
    (tmp_path / "json").mkdir()  # a folder of data: no package
    monkeypatch.chdir(tmp_path)
    with listening() as port:
        cluster = {"address": f"127.0.0.1:{port}"}
        assert found(tmp_path, cluster=cluster) == []
        submitted = '{"runtime_env": {"working_dir": "gcs://_ray_pkg_ef64e1df.zip"}}'
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", submitted)
        queue, trainer = found(tmp_path, cluster=cluster)
    assert "queue/__init__.py: Ray's workers look into the submitted working directory" in queue
    assert "module 'trainer' of everstep itself; rename it" in trainer


def test_shared_memory_that_is_too_small_for_snapshots_is_said_with_what_is_needed() -> None:
    """A container has 64 MB unless told otherwise; each recovery went back to a checkpoint."""
    settings = Settings.model_validate({"cluster": {"workers": 2}})
    much = 1 << 60
    assert f"Snapshots need {2 * much / 1e6:,.1f} MB" in why_no_snapshots(settings, much)
    assert why_no_snapshots(settings, 1) == ""
    without = Settings.model_validate({"recovery": {"snapshot_every_steps": 0}})
    assert why_no_snapshots(without, much) == ""


def test_an_address_where_nothing_listens_is_refused_with_its_setting(tmp_path: Path) -> None:
    """Three tries of a minute each ended in "Ray: _join: no answer"."""
    with listening() as port:
        pass  # now nobody listens there
    said = the_one(
        tmp_path,
        cluster={"address": f"127.0.0.1:{port}"},
        heartbeats={"redis_url": "local"},
    )
    assert f"cluster.address = '127.0.0.1:{port}': connection refused" in said


def test_a_redis_where_nothing_listens_is_refused_with_its_setting(tmp_path: Path) -> None:
    """The job trained to its end without a single heartbeat."""
    with listening() as port:
        pass
    said = the_one(tmp_path, heartbeats={"redis_url": f"redis://:secret@127.0.0.1:{port}"})
    assert f"heartbeats.redis_url: 127.0.0.1:{port}: connection refused" in said
    assert "secret" not in said


def test_a_server_that_is_no_redis_is_refused(tmp_path: Path) -> None:
    """It accepts, and says nothing: blindness at the start is a mistake, not a mood."""
    with listening() as port:
        said = the_one(tmp_path, heartbeats={"redis_url": f"redis://127.0.0.1:{port}"})
    assert "does not answer as a Redis should" in said


def test_an_unknown_host_is_named(tmp_path: Path) -> None:
    """A name that no resolver knows is a typing error."""
    said = the_one(tmp_path, heartbeats={"redis_url": "redis://nowhere.invalid:6379"})
    assert "the host 'nowhere.invalid' is not known" in said


def test_shared_memory_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job trained, and every recovery went back to a checkpoint, without a word of why."""
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path / "not-mounted")
    assert f"snapshots go to {tmp_path / 'not-mounted'}" in the_one(tmp_path)
    assert found(tmp_path, recovery={"snapshot_every_steps": 0}) == []


TASK = "from trainer.task import Task\nclass Line(Task): ...\n"


@pytest.mark.parametrize("text", [TASK, "def Line(worker): ..."])
def test_a_setting_that_a_task_of_ones_own_does_not_read_is_refused(
    tmp_path: Path, text: str
) -> None:
    """A learning rate was set, tuned and written into a paper; the task had one of its own."""
    (tmp_path / "mine.py").write_text(text)
    mine: dict[str, Any] = {"task": "mine:Line"}
    said = found(tmp_path, trainer={**mine, "optimizer": {"beta1": 0.5}, "accumulation_steps": 2})
    assert [line.partition(":")[0] for line in said] == [
        "trainer.accumulation_steps",
        "trainer.optimizer.beta1",
    ]
    assert "[trainer.options]" in said[0]
    assert found(tmp_path, trainer={**mine, "data": {"batch_size": 6}, "options": {"x": 1}}) == []


@pytest.mark.parametrize(
    "text",
    [
        "from trainer.language.task import LanguageModel\nclass Line(LanguageModel): ...\n",
        "from trainer.task import Task\nclass Line(Task):\n    reads_all_settings = True\n",
    ],
)
def test_a_task_that_reads_those_settings_may_have_them(tmp_path: Path, text: str) -> None:
    """A variant of the built-in task inherits what the settings say of it."""
    (tmp_path / "mine.py").write_text(text)
    assert found(tmp_path, trainer={"task": "mine:Line", "optimizer": {"beta1": 0.5}}) == []


def test_a_batch_that_only_the_builtin_task_has_need_not_split_for_another(tmp_path: Path) -> None:
    """Three workers were refused for the batch size of a task that was not trained."""
    (tmp_path / "mine.py").write_text(TASK)
    three = {"workers": 3, "cpus_per_worker": 0.5}
    assert found(tmp_path, cluster=three, trainer={"task": "mine:Line"}) == []
    with pytest.raises(ValidationError, match="batch_size to a multiple of 3"):
        found(tmp_path, cluster=three)


def test_a_task_named_as_a_module_of_others_is_refused(tmp_path: Path) -> None:
    """`import queue` gets Python's, so that the user's would never be found."""
    (tmp_path / "queue.py").write_text("class Line: ...\n")
    said = the_one(tmp_path, trainer={"task": "queue:Line"})
    assert "'queue' is the name of a module of Python itself; rename yours" in said
    said = the_one(tmp_path, trainer={"task": "trainer:Line"})
    assert "'trainer' is the name of a module of everstep itself" in said


AUTO = {"cluster": {"address": "auto"}, "heartbeats": {"redis_url": "redis://h:1"}}


def test_auto_is_the_cluster_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works on a cluster has RAY_ADDRESS set, and every tool of Ray's takes it."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    settings = Settings.model_validate(AUTO)
    assert with_address(settings).cluster.address == "10.0.0.7:6379"
    own = Settings()
    assert with_address(own).cluster.address == "local"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "RAY_ADDRESS is not set"),
        ("auto", "RAY_ADDRESS is not set"),
        ("ray://head:10001", "Ray Client and URLs are not supported"),
        ("head", "must be HOST:PORT"),
    ],
)
def test_auto_without_a_cluster_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    """It was refused as an address, without a word of what would do."""
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    with pytest.raises(SettingsError, match=r'cluster\.address = "auto"') as error:
        with_address(Settings.model_validate(AUTO))
    assert said in str(error.value)
