"""Ray Train V2's JaxTrainer on our language model; `ray_train` starts it and strikes.

Done as its documentation shows: Orbax checkpoints every 20 steps, restored by the training function
when Ray Train calls it again. JAX's persistent compilation cache is on. Nothing is tuned but that.
"""

# mypy: allow-untyped-calls
# (parts of jax carry no types)
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

CHECKPOINT_EVERY = 20


def train(config: dict[str, Any]) -> None:
    """What each of the two workers runs; rank 0 writes a line a step."""
    import time

    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    import ray.train

    jax.config.update("jax_compilation_cache_dir", f"{config['folder']}/cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from trainer.compute import step
    from trainer.config import TrainerSettings
    from trainer.task import Context
    from trainer.training.find_task import load_task

    ranks = ray.train.get_context()
    rank = ranks.get_world_rank()
    settings = TrainerSettings.model_validate(config["settings"])
    layout = step.make_layout(settings.mesh)
    task = load_task(
        Context(
            rank=rank,
            world_size=ranks.get_world_size(),
            local_rank=ranks.get_local_rank(),
            node_rank=ranks.get_node_rank(),
            generation=1,
            config_dir=config["folder"],
            settings=settings,
        )
    )
    programs = step.compile_programs(task, layout, settings.seed)
    state = step.initial_state(task, programs, settings.seed)
    start = 0
    manager = ocp.CheckpointManager(
        f"{config['folder']}/checkpoints",
        options=ocp.CheckpointManagerOptions(save_interval_steps=CHECKPOINT_EVERY, max_to_keep=3),
    )

    def plain(tree: Any) -> Any:
        """Orbax takes random keys as their bits."""
        return {**tree, "key": jax.random.key_data(tree["key"])}

    if (newest := manager.latest_step()) is not None:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.whole),
            plain(state),
        )
        saved = manager.restore(newest, args=ocp.args.StandardRestore(shapes))
        state = {**saved, "key": jax.random.wrap_key_data(jnp.asarray(saved["key"]))}
        start = newest + 1
    pids = Path(config["folder"]) / "pids"
    pids.mkdir(exist_ok=True)
    (pids / f"rank-{rank}").write_text(str(os.getpid()))
    with (Path(config["folder"]) / f"rows-{rank}.jsonl").open("a") as rows:
        for index in range(start, settings.steps):
            began = time.monotonic()
            batch = step.place_rows(layout, task.batch(index))
            state, metrics = programs.train(state, batch)
            loss = float(metrics["loss"].addressable_data(0))
            line = {
                "step": index,
                "loss": loss,
                "step_s": time.monotonic() - began,
                "at": time.time(),
                "start": start,
                "pid": os.getpid(),
            }
            rows.write(json.dumps(line) + "\n")
            rows.flush()
            manager.save(index, args=ocp.args.StandardSave(plain(state)))
    manager.wait_until_finished()


def main() -> None:
    """Read the configuration (JSON) from the command line and train until killed."""
    config = json.loads(sys.argv[1])
    os.environ.update({"RAY_TRAIN_V2_ENABLED": "1", "JAX_PLATFORMS": "cpu", "NPROC": "1"})
    import ray
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=config["ray"])
    trainer = JaxTrainer(
        train,
        train_loop_config=config,
        # Its way of calling jax.distributed.initialize is tied to this flag; JAX_PLATFORMS decides.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="peer",
            storage_path=f"{config['folder']}/store",
            failure_config=FailureConfig(max_failures=1000),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
