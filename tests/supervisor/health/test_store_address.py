"""Where heartbeats go: out of the settings, a file and the environment; TLS; no secret shown."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import trustme

from supervisor.cluster.own_servers import EmbeddedRedis
from supervisor.config import HeartbeatSettings, Settings, describe, effective
from supervisor.errors import ClusterUnusable
from supervisor.health.store import RedisStore, StoreUnavailable
from supervisor.health.store_address import address_of, take_password
from tests.relay import Relay
from trainer.host.environment import PASSWORD_VARIABLE
from trainer.settings import SettingsError, read_settings
from trainer.wire.heartbeat import connect
from trainer.wire.store_address import StoreAddress

SECRET = "hunter2"


def settings_of(*overrides: str) -> Settings:
    settings, _ = read_settings(
        Settings, None, [f"heartbeats.{override}" for override in overrides]
    )
    return settings


def heartbeats(*overrides: str) -> HeartbeatSettings:
    return settings_of(*overrides).heartbeats


def test_user_database_and_escapes_of_a_url_reach_the_workers_too(tmp_path: Path) -> None:
    """The daemon read database 2 and the workers wrote to database 0: all of them were silent."""
    url = "redis_url=rediss://ana:p%40ss@[::1]:7000/2"
    assert address_of(heartbeats(url), tmp_path) == StoreAddress(
        host="::1", port=7000, username="ana", password="p@ss", db=2, tls=True
    )
    plain = address_of(heartbeats("redis_url=redis://store"), tmp_path)
    assert plain == StoreAddress(host="store", port=6379)


def test_the_password_comes_from_the_url_the_file_or_the_environment(tmp_path: Path) -> None:
    """In the settings it is in version control, in arguments it is in `ps`."""
    (tmp_path / "secret").write_text("from the file\n")
    by_file = heartbeats("redis_url=redis://store", "redis_password_file=secret")
    environment = {PASSWORD_VARIABLE: "from the environment", "HOME": "/"}
    password = take_password(environment)
    assert environment == {"HOME": "/"}  # no child inherits it
    assert take_password(environment) == ""
    assert address_of(by_file, tmp_path, password).password == "from the file"
    bare = heartbeats("redis_url=redis://store")
    assert address_of(bare, tmp_path, password).password == "from the environment"
    given = heartbeats("redis_url=redis://:given@store")
    assert address_of(given, tmp_path, password).password == "given"
    assert address_of(bare, tmp_path).password is None


@pytest.mark.parametrize("key", ["redis_password_file", "redis_ca_file"])
def test_a_file_that_cannot_be_read_is_named_with_its_key(tmp_path: Path, key: str) -> None:
    """Without it the store would refuse us later, with words about passwords."""
    found = heartbeats("redis_url=rediss://store", f"{key}=missing")
    with pytest.raises(ClusterUnusable, match=rf"heartbeats\.{key}: .*missing cannot be read"):
        address_of(found, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"redis_url=http://:{SECRET}@host"], "must be"),
        ([f"redis_url=redis://:{SECRET}@host:port"], "is no URL"),
        ([f"redis_url=redis://:{SECRET}@host:99999"], "is no URL"),
        ([f"redis_url=redis://:{SECRET}@"], "names no host"),
        ([f"redis_url=redis://:{SECRET}@host/name"], "no number"),
        ([f"redis_url=redis://:{SECRET}@host?ssl=yes"], "holds more"),
        ([f"redis_url=redis://:{SECRET}@host", "redis_ca_file=ca.pem"], "only TLS"),
        ([f"redis_url=redis://:{SECRET}@host", "redis_password_file=secret"], "two passwords"),
        (["redis_password_file=secret"], "makes its own password"),
        ([f'redis_url="redis://:{SECRET}@host'], "not valid TOML"),
        ([f'redis_url="redis://:{SECRET}@host" x'], "not valid TOML"),
    ],
)
def test_a_mistake_in_a_url_is_told_without_its_password(overrides: list[str], words: str) -> None:
    """What a start complains about is pasted into reports."""
    with pytest.raises(SettingsError) as caught:
        settings_of(*overrides)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)


def test_nothing_that_is_printed_of_an_address_holds_the_password() -> None:
    """A dataclass in a traceback, a settings object in a log line."""
    url = f"redis://:{SECRET}@host"
    settings = settings_of(f"redis_url={url}")
    assert SECRET not in describe(effective(settings, {}))
    address = StoreAddress(host="host", port=1, password=SECRET)
    assert SECRET not in repr(address)
    assert asdict(address)["password"] == SECRET  # which belongs on a pipe


# --- TLS --------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """Signs certificates; its own is in ca.pem."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return authority


@pytest.fixture
def tls_port(tmp_path: Path, authority: trustme.CA) -> Iterator[int]:
    """A Redis behind TLS, by the name of 127.0.0.1, with a password."""
    server = EmbeddedRedis(tmp_path / "server")
    (tmp_path / "server").mkdir()
    address = server.ensure()
    (tmp_path / "password").write_text(str(address.password))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    relay = Relay(address.port, tls=context)
    yield relay.port
    relay.end()
    server.stop()


def secured(port: int, *more: str) -> HeartbeatSettings:
    url = f"redis_url=rediss://127.0.0.1:{port}"
    return heartbeats(url, "redis_password_file=password", *more)


async def polled(address: StoreAddress) -> list[str | None]:
    store = RedisStore(job="job", address=address, timeout_s=2.0)
    try:
        return await store.poll(["a"])
    finally:
        await store.close()


def test_daemon_and_workers_speak_tls_with_a_server_that_the_file_vouches_for(
    tmp_path: Path, tls_port: int
) -> None:
    """Heartbeats cross networks that are not ours."""
    address = address_of(secured(tls_port, "redis_ca_file=ca.pem"), tmp_path)
    with connect(address)(2.0) as client:  # as a worker does
        assert client.set("a", "beat")
    assert asyncio.run(polled(address)) == ["beat"]


def test_a_server_that_nobody_vouches_for_gets_no_password(tmp_path: Path, tls_port: int) -> None:
    """Whoever took over the address would read it, and could write heartbeats."""
    strangers = trustme.CA()
    strangers.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    for more in ([], ["redis_ca_file=other.pem"]):
        address = address_of(secured(tls_port, *more), tmp_path)
        with pytest.raises(StoreUnavailable, match="certificate verify failed") as caught:
            asyncio.run(polled(address))
        assert str(address.password) not in str(caught.value)


def test_a_certificate_for_another_host_is_refused(tmp_path: Path, authority: trustme.CA) -> None:
    """A valid certificate of some other machine is no proof of this one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("elsewhere.example").configure_cert(context)
    relay = Relay(1, tls=context)
    (tmp_path / "password").write_text(SECRET)
    address = address_of(secured(relay.port, "redis_ca_file=ca.pem"), tmp_path)
    with pytest.raises(StoreUnavailable, match="certificate"):
        asyncio.run(polled(address))
    relay.end()
