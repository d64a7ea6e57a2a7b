"""The pages that a user reads, and the commands that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        ROOT / "README.md",
        ROOT / "deploy/examples/README.md",
        *(ROOT / "deploy/docs").glob("*.md"),
    )
)
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """What the blocks of a page tell a user to type, without comments."""
    lines = [
        line for block in _BLOCK.findall((ROOT / page).read_text()) for line in block.splitlines()
    ]
    return [typed for line in lines if (typed := re.sub(r"\s+#.*$", "", line).strip())]
