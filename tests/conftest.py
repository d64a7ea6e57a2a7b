"""Options of the test suite, and what a full run asks of the machine."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Generator

import pytest
from hypothesis import settings

# On a CI server Hypothesis would try the same examples for ever.
settings.register_profile("fresh", derandomize=False, print_blob=True)
settings.load_profile("fresh")

NAMESPACES = ("unshare", "--mount", "--pid", "--net", "--fork", "true")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-traces` accepts the journals of the scenarios as the new golden traces."""
    parser.addoption("--rewrite-traces", action="store_true", help="rewrite tests/traces")
    parser.addoption(
        "--full", action="store_true", help="the whole matrix; as root, a skip is then a failure"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register what belongs to the full matrix only."""
    config.addinivalue_line("markers", "full: runs only with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full the smoke set runs."""
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="of the full matrix: --full"))


@functools.cache
def all_capabilities_at_hand() -> bool:
    """Return whether this is root on a machine where namespaces can be made."""
    if os.geteuid() != 0:
        return False
    try:
        return subprocess.run(NAMESPACES, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def fail_if_skipped(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> None:
    """A check that a full run leaves out unseen is no check: make its skip a failure."""
    if report.skipped and config.getoption("--full") and all_capabilities_at_hand():
        if hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: a full run leaves nothing out; {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See `fail_if_skipped`."""
    report = yield
    fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """See `fail_if_skipped`: a module may be left out as a whole."""
    report = yield
    fail_if_skipped(report, collector.config)
    return report
