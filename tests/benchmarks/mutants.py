"""Which small faults in the core go unnoticed by its tests? Plants them one at a time.

    python -m tests.benchmarks.mutants --count 110
    python -m tests.benchmarks.mutants --only "quarantine_restore_point"

A fault is a comparison turned, a condition that always or never holds, a statement left out, a
number off by one. Each is planted in a copy of the repository. A fault that every test passes
with is printed; unless ACCEPTED gives a reason why it changes nothing, the status is 1.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = Path("supervisor/fsm/job.py")
TESTS = (
    "tests/supervisor/fsm",
    "tests/test_recoveries.py",
    "tests/test_errors_that_pass.py",
    "tests/test_scenarios.py",
    "tests/test_deaths_of_the_daemon.py",
)
LIMIT_S = 300.0  # A fault that makes the tests run without end is noticed too.

# Faults that change nothing anyone relies on: "function: before -> after", and why.
ACCEPTED: dict[str, str] = {
    "kill_workers: self.incident and self.purpose == 'recover' -> self.purpose == 'recover'": (
        "a drain to recover has an incident; the question is for the type checker"
    ),
}

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: the source with it, and how to name it without a line number."""

    name: str
    line: int
    source: str


class Faults:
    """All faults that can be planted in one file."""

    def __init__(self, source: str) -> None:
        self._lines = source.encode().splitlines(keepends=True)
        self._tree = ast.parse(source)

    def __iter__(self) -> Iterator[Fault]:
        for function in ast.walk(self._tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    for after in changes(node, function):
                        yield self._fault(function.name, node, after)

    def _fault(self, function: str, node: ast.AST, after: str) -> Fault:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        head, tail = self._lines[first][: node.col_offset], self._lines[last][node.end_col_offset :]
        changed = [*self._lines[:first], head + after.encode() + tail, *self._lines[last + 1 :]]
        before = ast.unparse(node).splitlines()[0]
        name = f"{function}: {before} -> {after.strip('()') or 'nothing'}"
        return Fault(name=name, line=node.lineno, source=b"".join(changed).decode())


def changes(node: ast.AST, function: ast.FunctionDef) -> Iterator[str]:
    """What may stand in place of `node`, a part of `function`."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            turned: list[ast.cmpop] = list(node.ops)
            turned[place] = TURNED[type(operator)]()
            yield f"({ast.unparse(ast.Compare(node.left, turned, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
        for place in range(len(node.values)):
            rest = node.values[:place] + node.values[place + 1 :]
            yield f"({ast.unparse(ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        turned_op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield f"({ast.unparse(ast.BinOp(node.left, turned_op, node.right))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield str(node.value + 1)
    elif isinstance(node, ast.If):
        for always in (True, False):
            changed = ast.If(ast.Constant(always), node.body, node.orelse)
            yield ast.unparse(changed).replace("\n", f"\n{' ' * node.col_offset}")
    elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise) and not is_docstring(
        node, function
    ):
        yield "pass"


def is_docstring(node: ast.stmt, function: ast.FunctionDef) -> bool:
    return node is function.body[0] and ast.get_docstring(function) is not None


def is_noticed(fault: Fault, copy: Path, file: Path) -> bool:
    """Whether some test fails with the fault in place; what stood there is put back."""
    whole = (copy / file).read_text()
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS)
    try:
        (copy / file).write_text(fault.source)
        run = subprocess.run(command, cwd=copy, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        (copy / file).write_text(whole)
    return run.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=CORE, help="where the faults are planted")
    parser.add_argument("--count", type=int, default=110, help="how many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only faults with this in their name")
    asked = parser.parse_args()
    faults = [
        fault for fault in Faults((ROOT / asked.file).read_text()) if asked.only in fault.name
    ]
    drawn = random.Random(asked.seed).sample(faults, min(asked.count, len(faults)))
    unnoticed = accepted = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=left_out)
        for fault in drawn:
            if is_noticed(fault, copy, asked.file):
                continue
            reason = ACCEPTED.get(fault.name, "")
            accepted, unnoticed = accepted + bool(reason), unnoticed + (not reason)
            print(
                f"{asked.file}:{fault.line}: {fault.name}{reason and f'  ({reason})'}", flush=True
            )
    print(
        f"{len(drawn)} of {len(faults)} faults planted, seed {asked.seed}: "
        f"{unnoticed} unnoticed, {accepted} accepted with a reason"
    )
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
