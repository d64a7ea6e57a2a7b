"""Whether replicas that should hold the same bits do; pure, no jax."""

from __future__ import annotations

from collections.abc import Sequence

APPLIED = "applied"
"""Metric of a guarded step: whether its update was kept."""


def dissenters(prints: Sequence[Sequence[tuple[int, ...]]]) -> set[tuple[int, int]]:
    """Which (replica, part) differ from most of their kind; all, where no majority agrees.

    `prints` holds a fingerprint for each part of each replica.
    """
    found: set[tuple[int, int]] = set()
    for part in range(len(prints[0])):
        column = [replica[part] for replica in prints]
        usual = max(column, key=column.count)
        agree = column.count(usual)
        if agree == len(column):
            continue
        no_majority = 2 * agree <= len(column)
        found |= {
            (replica, part) for replica, one in enumerate(column) if no_majority or one != usual
        }
    return found
