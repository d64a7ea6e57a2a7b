"""Random walks from a seed: over the pure core, and over the whole daemon in virtual time.

Every test run walks some fresh seeds and prints them; `python -m tests.fuzz.core FIRST COUNT` and
`python -m tests.fuzz.sim FIRST COUNT` walk as many as wanted, or one again.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable


class Violation(Exception):
    """A promise that did not hold."""


def main(module: str, walk: Callable[[int], str]) -> int:
    """Walk COUNT seeds from FIRST on and print each kind of violation with its first seeds.

    `walk` returns how the run ended. The exit status is 1 if any promise did not hold.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=walk.__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds")
    given = parser.parse_args()
    began, ends, kinds = time.monotonic(), Counter[str](), Counter[str]()
    for seed in range(given.first, given.first + given.count):
        try:
            ends[walk(seed)] += 1
        except Exception as error:
            kind = re.sub(r"\d+(\.\d+)?", "#", f"{type(error).__name__}: {str(error)[:100]}")
            kinds[kind] += 1
            if kinds[kind] <= 3:
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    took_s = time.monotonic() - began
    print(f"{given.count} seeds from {given.first} in {took_s:.0f} s; ends: {dict(ends)}")
    for kind, times in kinds.most_common():
        print(f"{times} times {kind}")
    return 1 if kinds else 0
