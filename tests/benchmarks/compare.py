"""The same SIGKILL on everstep and on Ray Train V2's JaxTrainer, in one run on one machine."""

from __future__ import annotations

import statistics

from tests.benchmarks import ray_train, recovery
from tests.benchmarks.report import (
    circumstances,
    note,
    parser_of,
    print_circumstances,
    print_table,
    write_json,
)
from tests.benchmarks.supervised import Row, folder_of


def main() -> None:
    """Measure both, print the ratio, write."""
    parser = parser_of("compare", __doc__)
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of everstep")
    parser.add_argument("--peer-kills", type=int, default=4, metavar="N")
    parser.add_argument("--snapshot-every", default="1", metavar="STEPS")
    recovery.add_patience(parser)
    options = parser.parse_args()
    facts = circumstances()
    with folder_of("compare", keep=options.keep) as folder:
        note("everstep")
        ours = recovery.measure(
            folder / "everstep",
            kills=options.kills,
            fault="kill",
            ranks=[1, 0],
            standby="generation",
            snapshot_every=recovery.every(options.snapshot_every),
            settle_s=1.0,
            seed=0,
            patience_s=options.patience,
        )
        note("Ray Train")
        peer = ray_train.measure(folder / "ray-train", kills=options.peer_kills)
    recovery.print_rows(f"everstep, {options.kills} SIGKILLs", ours)
    ray_train.print_peer(peer)
    ratio = print_ratio(ours, peer["strikes"])
    print_circumstances(facts)
    write_json(
        options.json,
        {"benchmark": "compare", **facts, "ratio": ratio, "everstep": ours, "ray_train": peer},
    )


def print_ratio(ours: list[Row], peers: list[Row]) -> float:
    """Medians side by side; how many times faster everstep was."""
    rows = []
    for name in ("total", "redone"):
        mine, theirs = (
            float(statistics.median(row[name] for row in rows)) for rows in (ours, peers)
        )
        rows.append([name, mine, theirs])
    ratio = float(rows[0][2]) / float(rows[0][1])
    print_table("medians (seconds, steps)", ["", "everstep", "Ray Train"], rows)
    print(f"from SIGKILL to the end of the first new step: {ratio:.0f} times faster")
    return ratio


if __name__ == "__main__":
    main()
