"""The model gives the same losses however its parts are spread over devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import models
from tests.trainer.harness import write_text
from trainer.host.environment import worker_environment

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")

WHOLE: dict[str, Any] = {
    "steps": 4,
    "accumulation_steps": 2,
    "model": {"layers": 5, "width": 16, "heads": 4, "key_value_heads": 2, "hidden": 24},
    "data": {"path": ["text.txt"], "batch_size": 16, "sequence_length": 16},
    "optimizer": {"warmup_steps": 0},
}
LOW_RANK: dict[str, Any] = {
    **WHOLE,
    "accumulation_steps": 1,
    "model": {"pretrained": "model", "lora_rank": 4, "remat": True},
}


FEW = [[1, 1, 1], [2, 2, 2]]
TABLE = [[1, 1, 1], [8, 1, 1], [1, 8, 1], [1, 1, 2], [2, 2, 2], [1, 2, 4], [2, 1, 4], [1, 4, 1]]


@pytest.mark.parametrize("kind", ["whole", pytest.param("low rank", marks=pytest.mark.full)])
def test_every_mesh_trains_to_the_same_losses_and_parameters(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A matrix cut along the wrong axis, or a mean over one replica's rows, still learns."""
    write_text(tmp_path)
    config = models.FAMILY["qwen2"]
    models.write_folder(tmp_path / "model", config, models.tensors(config))
    meshes = TABLE if request.config.getoption("--full") else FEW
    rows = train(tmp_path, WHOLE if kind == "whole" else LOW_RANK, meshes)
    assert [row["mesh"] for row in rows] == meshes
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5), row
        assert row["apart"] < 1e-3, row
    shares = {tuple(row["mesh"]): row["share"] for row in rows}
    assert shares[2, 2, 2] < 0.35
    assert shares.get((8, 1, 1), 1.0) == 1.0
    # Of low-rank additions fsdp cuts the inner factors only; here they are a large part of all.
    assert shares.get((1, 8, 1), 0.0) < (0.2 if kind == "whole" else 0.3)


def train(folder: Path, settings: dict[str, Any], meshes: list[list[int]]) -> list[dict[str, Any]]:
    """What `tests.trainer.meshes` tells."""
    (folder / "settings.json").write_text(json.dumps(settings))
    environment = worker_environment(1, 0, os.environ)
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "tests.trainer.meshes", str(folder)]
    done = subprocess.run(
        [*command, str(folder / "settings.json"), json.dumps(meshes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
