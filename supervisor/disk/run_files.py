"""The files of a run, reached from threads: a disk may hang, the loop of the daemon may not.

It decides nothing: what to keep, quarantine or write is said by the effects.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from supervisor.disk import incidents, restore_points
from supervisor.disk.restore_points import RestorePoint
from supervisor.errors import DiskError
from trainer.host.atomic_write import write_whole

RESULT_FILE = "result.json"


class RunFiles:
    """The real `Disk` of the performers, below `<run_dir>/<job>`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._pruning = asyncio.Lock()

    async def restore_points(self, accepted: Sequence[int]) -> list[RestorePoint]:
        """What can be restored of the accepted generations, the newest first. Raises OSError."""
        return await asyncio.to_thread(restore_points.find, self.run_dir, accepted)

    async def flaw(self, generation: int, step: int) -> str:
        """Why a checkpoint is no restore point. Raises OSError."""
        return await asyncio.to_thread(restore_points.flaw, self.run_dir, generation, step)

    async def keep_snapshot(self, generation: int, step: int) -> str:
        """Have a process of its own do it: it needs JAX, which the daemon must not load.

        It ends with the daemon, or when this is cancelled. Raises OSError, DiskError.
        """
        module = [sys.executable, "-P", "-m", "trainer.state.keep_snapshot"]
        process = await asyncio.create_subprocess_exec(
            *module,
            *(str(self.run_dir), str(generation), str(step)),
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # a Ctrl-C at the terminal is the daemon's to judge
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            said, wrong = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            lines = wrong.decode(errors="replace").strip().splitlines() or ["no word"]
            raise DiskError(f"the snapshot of step {step} could not be written: {lines[-1]}")
        return said.decode().strip()

    async def quarantine(self, path: str, why: str) -> None:
        """Move a restore point to where nothing picks it again; fine if it is gone already."""
        place = Path(path)
        point = RestorePoint(
            step=int(place.name),
            generation=int(place.parent.name.removeprefix("generation-")),
            path=place,
        )
        try:
            await asyncio.to_thread(restore_points.quarantine, point, why)
        except FileNotFoundError:
            return

    async def quarantine_above(self, step: int, why: str) -> None:
        """Set aside whatever lies above a step, finished or not; only while no worker lives."""
        await asyncio.to_thread(restore_points.quarantine_above, self.run_dir, step, why)

    async def prune(
        self,
        keep: int,
        verified: Sequence[tuple[int, int]],
        spared: Sequence[tuple[int, int]],
    ) -> None:
        """Delete what retention no longer keeps; one after another, lest two delete the same."""
        async with self._pruning:
            await asyncio.to_thread(
                restore_points.prune, self.run_dir, keep, set(verified), set(spared)
            )

    async def sweep_unfinished(self) -> list[Path]:
        """Delete the remains of saves that never ended; only while no worker lives."""
        return await asyncio.to_thread(restore_points.sweep_unfinished, self.run_dir)

    async def write_evidence(
        self, incident: int, generation: int, evidence: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Write stacks, log tails and the rest of what the slots found."""
        await asyncio.to_thread(
            incidents.write_evidence, self.run_dir, incident, generation, evidence
        )

    async def write_summary(self, incident: int, summary: Mapping[str, Any]) -> None:
        """Write incident.json."""
        await asyncio.to_thread(incidents.write_summary, self.run_dir, incident, summary)

    async def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json: whole or not at all."""
        await asyncio.to_thread(self._write_result, result)

    def _write_result(self, result: Mapping[str, Any]) -> None:
        write_whole(self.run_dir / RESULT_FILE, json.dumps(result, indent=2) + "\n")
