"""The schema: its defaults, its relations, and the file that shows them."""

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from supervisor.config import (
    Location,
    Settings,
    describe,
    effective,
    job_directory,
    template,
)
from trainer.settings import SettingsError, branches, read_settings, walk

ROOT = Path(__file__).parents[2]


def default_of(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True, validated_data={})


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        read_settings(Settings, None, overrides)
    return caught.value.problems


def test_the_default_job_names_every_setting_with_its_default() -> None:
    """A default that changes must be seen by whoever reads the change: `check --defaults`."""
    assert (ROOT / "job.toml").read_text() == template()


def test_the_default_job_is_read_as_the_defaults() -> None:
    """The file that is shown must mean what it says."""
    settings, origins = read_settings(Settings, ROOT / "job.toml")
    assert settings == Settings()
    assert set(origins.values()) == {"file"}
    data = tomllib.loads((ROOT / "job.toml").read_text())
    for key, field in walk(Settings):
        value = data
        for part in key.split("."):
            value = value[part]
        expected = json.loads(json.dumps(default_of(field)))
        assert value == expected, key


def test_every_setting_is_explained_and_seconds_are_named() -> None:
    """An unexplained key is one that is set by guessing; a wrong unit is off by sixty."""
    for key, field in walk(Settings):
        assert field.description, key
        if key.endswith("_s"):
            assert "second" in field.description, key


def test_every_line_of_the_default_job_is_annotated() -> None:
    """The newcomer reads this file first."""
    lines = (ROOT / "job.toml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith("#"):
            assert "#" in line or above.startswith("#"), line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("heartbeats.every_s=2", "a lease must outlast two heartbeats"),
        ("heartbeats.lease_s=40", "every_s < lease_s < drain_s; set drain_s above 40"),
        ("deadlines.drain_s=2", "every_s < lease_s < drain_s"),
        ("recovery.last_call_s=30", "set last_call_s below 30"),
        ("deadlines.step_s=0.3", 'set step_s to 0.5 or more, or to "auto"'),
        ("budgets.backoff_base_s=90", "raise backoff_max_s"),
        ("cluster.workers=3", "set batch_size to a multiple of 3 (15 or 18)"),
        ("cluster.workers=32", "set batch_size to a multiple of 32 (32)"),
        ("cluster.gpus_per_worker=5", "set batch_size to a multiple of 10 (10 or 20)"),
        ("trainer.mesh.dp=4", "make dp x fsdp x tp = 2"),
        ("trainer.mesh.fsdp=3", "make dp x fsdp x tp = 2"),
        ("cluster.workers=0", "at least 1"),
        ("checkpoint.keep=1", "at least 2"),
        ("cluster.address=ray://host:1", "Ray Client and URLs are not supported"),
        ("cluster.address=somewhere", "must be HOST:PORT of the head"),
        ("heartbeats.redis_url=localhost:6379", "redis://"),
        ("job.name=../x", "must be a text matching"),
        ("budgets.failures_max=-2", "at least -1"),
        ("recovery.orphan_after_s=3", "set orphan_after_s well above 3, or to 0"),
    ],
)
def test_a_setting_out_of_order_is_told_with_its_remedy(override: str, words: str) -> None:
    """Time-outs in the wrong order made a supervisor give up before its workers could (case 28)."""
    told = problems(override)
    assert any(words in problem for problem in told), told
    assert override.partition("=")[0] in told[0]


def test_secrets_are_masked_and_origins_shown() -> None:
    """The output of `check` is what people paste into a report."""
    url = "redis://user:hush@store:6379/0"
    settings, origins = read_settings(Settings, None, [f"heartbeats.redis_url={url}"])
    rows = effective(settings, origins)
    assert settings.heartbeats.redis_url == url
    assert rows["heartbeats.redis_url"] == {
        "value": "redis://user:***@store:6379/0",
        "origin": "--set",
    }
    assert list(rows) == [key for key, _ in walk(Settings)]
    assert "hush" not in describe(rows) + json.dumps(rows)
    assert tomllib.loads(describe(rows))["deadlines"]["drain_s"] == 30.0


def test_drills_are_on_only_for_the_jobs_own_cluster() -> None:
    """Nobody shall strike a worker on a shared cluster by mistake."""
    for overrides, allowed in (
        ([], True),
        (["cluster.address=10.0.0.1:6379"], False),
        (["cluster.address=10.0.0.1:6379", "control.drills=true"], True),
        (["control.drills=false"], False),
    ):
        settings, _ = read_settings(Settings, None, overrides)
        assert settings.drills_allowed is allowed


def test_the_run_directory_does_not_depend_on_where_the_command_was_given(tmp_path: Path) -> None:
    """Resumed from another directory, a job began again from nothing."""
    job = Settings().job
    assert job_directory(job, tmp_path / "job.toml") == tmp_path / "runs" / "first"
    elsewhere = job.model_copy(update={"run_dir": "/data"})
    assert job_directory(elsewhere, tmp_path / "job.toml") == Path("/data/first")


def test_a_job_is_found_although_its_settings_are_broken_by_now(tmp_path: Path) -> None:
    """`status` must work while somebody edits the file."""
    path = tmp_path / "job.toml"
    path.write_text("[job]\nname = 'mine'\n[trainer]\nsteps = 'many'\n")
    location, _ = read_settings(Location, path)
    assert location.job.name == "mine"


def test_every_number_has_a_smallest_and_a_largest_value() -> None:
    """`every_s = 1e-9` was accepted, and spun; 1e300 is infinite on a device."""
    for key, field in walk(Settings):
        for kind, notes in branches(field.annotation, field.metadata):
            if kind in (int, float):
                bounds = {
                    name
                    for note in notes
                    for name in ("gt", "ge", "lt", "le")
                    if hasattr(note, name)
                }
                assert bounds & {"gt", "ge"}, key
                assert bounds & {"lt", "le"}, key


def test_every_text_refuses_control_characters() -> None:
    """A NUL in `run_dir` was a traceback; an escape code in a name acts on every terminal."""
    texts = 0
    for key, field in walk(Settings):
        kinds = [kind for kind, _ in branches(field.annotation, field.metadata)]
        if str not in kinds and tuple[str, ...] not in kinds:
            continue
        texts += 1
        value = '"a\\u0000b"' if str in kinds else '["a\\u001bb"]'
        (told,) = problems(f"{key}={value}")
        assert told.startswith(f"--set: {key} = ")
        assert "holds a control character" in told
    assert texts > 8


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("heartbeats.every_s=1e-9", "at least 0.01"),
        ("cluster.resources_per_worker={TPU = -1}", "'TPU'"),
        ("cluster.resources_per_worker={TPU = 0}", "from 0.0001 to 1e+09"),
        ("cluster.resources_per_worker={CPU = 1}", "set cpus_per_worker"),
        ('cluster.resources_per_worker={"" = 1}', "needs a name"),
        ('cluster.resources_per_worker={"a\\u0000" = 1}', "control character"),
        ("cluster.address=h:99999", "from 1 to 65535"),
        ("cluster.address=h:0", "from 1 to 65535"),
        ("cluster.address=h h:1", "HOST:PORT"),
        ("cluster.address=:6379", "HOST:PORT"),
        ("heartbeats.redis_url=redis://h:99999", "is no URL"),
        ("deadlines.drain_s=1e300", "at most 31536000.0"),
        ("trainer.optimizer.learning_rate=1e-300", "at least 1e-30"),
        ("trainer.optimizer.beta2=0.999999999", "at most 0.99999"),
        ("trainer.steps=10000000000", "at most 2147483647"),
        ("job.run_dir=~nobody-of-this-name/runs", "write ./~nobody-of-this-name"),
        (f"job.run_dir={'d' * 300}", "255 bytes"),
        (f"job.run_dir={'d/' * 3000}", "3800 bytes"),
    ],
)
def test_a_value_without_a_meaning_is_refused_with_its_remedy(override: str, words: str) -> None:
    """Each of these was accepted, or a traceback."""
    (told,) = problems(override)
    assert override.partition("=")[0] in told
    assert words in told


def test_a_tilde_is_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named `~` appeared beside job.toml; "rm -r ~" is what people do with it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["job.run_dir=~/runs", "trainer.data.path=~/texts", "trainer.data.cache=./~"]
    settings, _ = read_settings(Settings, None, overrides)
    assert job_directory(settings.job, "/elsewhere/job.toml") == tmp_path / "runs" / "first"
    assert settings.trainer.data.path == (str(tmp_path / "texts"),)
    assert settings.trainer.data.cache == "./~"


def test_the_free_table_of_a_task_may_hold_any_text() -> None:
    """What is in it is between the user and the task."""
    settings, _ = read_settings(Settings, None, ['trainer.options.prompt="two\\nlines"'])
    assert settings.trainer.options == {"prompt": "two\nlines"}


def test_a_run_directory_is_no_url() -> None:
    """A bucket's address became a folder named "s3:" beside the settings."""
    with pytest.raises(ValidationError, match="must be a directory, not a URL"):
        Settings.model_validate({"job": {"run_dir": "s3://bucket/runs"}})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"A B": "1"}, "no name of a variable"),
        ({"A": "1\0"}, "NUL"),
        ({"NPROC": "4"}, "NPROC is set by everstep itself"),
        ({"EVERSTEP_REDIS_PASSWORD": "x"}, "is set by everstep itself"),
    ],
)
def test_a_variable_that_cannot_be_or_is_ours_is_refused(env: dict[str, str], said: str) -> None:
    """The number of threads decides the bits of a loss, and no worker may have our secrets."""
    with pytest.raises(ValidationError, match=said):
        Settings.model_validate({"trainer": {"env": env}})
