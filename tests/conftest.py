"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-traces` accepts the journals of the scenarios as the new golden traces."""
    parser.addoption("--rewrite-traces", action="store_true", help="rewrite tests/traces")
    parser.addoption("--full", action="store_true", help="the whole matrix of real faults")
