"""Measurements as commands: `python -m tests.benchmarks.NAME`. Nothing here runs under pytest."""
