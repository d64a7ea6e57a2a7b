"""The live picture of a running job: a panel on a terminal, a JSON line now and then elsewhere.

It only looks at snapshots; whatever goes wrong while drawing never reaches the job.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from supervisor.console.output import BackgroundStream
from supervisor.console.terminal import without_echo
from trainer.host.printable import one_line

# What `status --json` answers (DESIGN section 10), and beside it, each missing or None if unknown:
# job (its name), loss, held_out_loss, unigram_entropy (nats a byte), tokens_per_s, step_s,
# time_left_s, uptime_s, last_event {event, at, why}, retry_in_s, hint (one line for a newcomer),
# purpose (of a drain), reason (of the end), journal_lost_since, heartbeat_store_lost_since.
Snapshot = Mapping[str, Any]

_COLOURS = {
    "RUNNING": "green",
    "COMPLETED": "green",
    "FAILED": "red",
    "DRAINING": "yellow",
    "RESTORING": "yellow",
    "STOPPED": "yellow",
}
_PROGRESS = (
    *("state", "generation", "step", "steps", "loss", "held_out_loss", "unigram_entropy"),
    *("tokens_per_s", "step_s", "time_left_s", "activity"),
)
_WORKERS_SHOWN = 8
_LONGEST = 240  # characters of one text
_HOST_LENGTH = 32
_LOG_LINES = 4
# Workers, and characters of a text, to show: the first of these that a terminal has room for.
_SIZES = ((_WORKERS_SHOWN, _LONGEST), (4, _LONGEST), (4, 140), (2, 140), (2, 60), (0, 60))
_log = structlog.get_logger()


class Display:
    """Shows `snapshot()` every `every_s` until stopped.

    On a terminal: a live panel. Elsewhere: a log line `progress` at most every `progress_s`, when
    the step or the state has changed. Use: `task = create_task(display.run())`, at the end
    `display.stop()` and `await task`; the last picture then stays on the screen.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        terminal: bool,
        console: Console | None = None,
        every_s: float = 0.5,
        progress_s: float = 10.0,
    ) -> None:
        self._snapshot = snapshot
        self._terminal = terminal
        self._console = console or Console()
        self._every_s = every_s
        self._progress_s = progress_s
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Show until `stop()`; returns early, with a log line, if the screen goes away."""
        try:
            if self._terminal:
                await self._draw()
            else:
                await self._tell()
        except Exception:  # training is worth more than its picture
            _log.exception("display_lost")

    def stop(self) -> None:
        """Show the last picture and let `run` return."""
        self._stopped.set()

    async def _draw(self) -> None:
        with ExitStack() as stack:
            with suppress(OSError):  # of no file
                stack.enter_context(without_echo(self._console.file.fileno()))
            live, size = self._live(), self._console.size
            stack.callback(lambda: live.stop())
            live.start()
            while True:
                ending = self._stopped.is_set()
                # A terminal that has stopped gets the picture of the time when it goes on.
                if ending or not self._is_behind():
                    if self._console.size != size:
                        # It has wrapped the lines of the last picture, whose place is not known.
                        size = self._console.size
                        live.update("")
                        live.stop()
                        self._console.clear()
                        live = self._live()
                        live.start()
                    live.update(fitted(self._snapshot(), self._console), refresh=True)
                if ending:
                    return
                await self._pause(self._every_s)

    def _live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=False)

    def _is_behind(self) -> bool:
        file = self._console.file
        return isinstance(file, BackgroundStream) and file.is_behind

    async def _tell(self) -> None:
        told: tuple[object, ...] = ()
        while True:
            ending = self._stopped.is_set()
            snapshot = self._snapshot()
            news = (snapshot.get("state"), snapshot.get("generation"), snapshot.get("step"))
            if news != told:
                _log.info("progress", **progress(snapshot))
                told = news
            if ending:
                return
            await self._pause(self._progress_s)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return


def progress(snapshot: Snapshot) -> dict[str, Any]:
    """The fields of a snapshot that are worth a log line; unknown ones are left out."""
    return {name: snapshot[name] for name in _PROGRESS if snapshot.get(name) is not None}


def fitted(snapshot: Snapshot, console: Console) -> RenderableType:
    """The most that the height of a terminal has room for."""
    panel: RenderableType = ""
    for workers_shown, longest in _SIZES:
        panel = render(snapshot, workers_shown=workers_shown, longest=longest)
        if len(console.render_lines(panel, pad=False)) < console.height:
            break
    return panel


def render(
    snapshot: Snapshot, *, workers_shown: int = _WORKERS_SHOWN, longest: int = _LONGEST
) -> RenderableType:
    """The panel for one snapshot, whatever its texts hold."""
    workers = snapshot.get("workers") or ()  # of thousands few are shown
    snapshot = _printable({**snapshot, "workers": ()}, longest)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")  # a path too long for a line is whole on two
    for label, content in (
        ("state", _state(snapshot)),
        ("now", Text(str(snapshot["activity"])) if snapshot.get("activity") else None),
        ("step", _steps(snapshot)),
        ("training", _training(snapshot)),
        ("restore from", _restore_point(snapshot)),
        ("standby", _standby(snapshot)),
        ("budgets", _budgets(snapshot)),
        ("incident", _incident(snapshot)),
        ("attention", _trouble(snapshot)),
        ("last event", _last_event(snapshot)),
        ("reason", Text(str(snapshot["reason"])) if snapshot.get("reason") else None),
        ("log", _log_tail(snapshot)),
        ("to do", Text(str(snapshot["remedy"]), "bold") if snapshot.get("remedy") else None),
    ):
        if content is not None:
            rows.add_row(label, content)
    parts: list[RenderableType] = [rows]
    if workers:
        parts += [Text(""), _workers(workers, workers_shown)]
    if snapshot.get("hint") and longest >= _LONGEST:
        parts += [Text(""), Text(str(snapshot["hint"]), style="dim")]
    title = " · ".join(str(word) for word in ("everstep", snapshot.get("job")) if word)
    return Panel(Group(*parts), title=title, title_align="left")


def _printable(value: Any, longest: int) -> Any:
    """The same with each text on one line, fit for a terminal; all of it is in the incident."""
    if isinstance(value, str):
        return one_line(value, longest)
    if isinstance(value, Mapping):
        return {key: _printable(inner, longest) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(inner, longest) for inner in value]
    return value


def _state(snapshot: Snapshot) -> Text:
    state = str(snapshot.get("state") or "unknown")
    text = Text(state, style=f"bold {_COLOURS.get(state, 'cyan')}")
    if state == "DRAINING" and snapshot.get("purpose"):
        text.append(f" to {snapshot['purpose']}", style="default not bold")
    if snapshot.get("generation") is not None:
        text.append(f"  generation {snapshot['generation']}", style="default not bold")
    if snapshot.get("uptime_s") is not None:
        text.append(f"  up {duration(snapshot['uptime_s'])}", style="dim not bold")
    if not snapshot.get("supervisor"):
        text.append("  no supervisor is running", style="dim not bold")
    return text


def _steps(snapshot: Snapshot) -> RenderableType | None:
    step, steps = snapshot.get("step"), snapshot.get("steps")
    if step is None:
        return None
    if not steps:
        return Text(f"{step:,}")
    row = Table.grid(padding=(0, 2))
    words = f"{step:,} of {steps:,}"
    left_s = snapshot.get("time_left_s")
    left = f"{duration(left_s)} left" if left_s is not None else ""
    bar = ProgressBar(total=steps, completed=min(step, steps), width=24)
    row.add_row(words, bar, f"{100 * step / steps:.0f} %", left)
    return row


def _training(snapshot: Snapshot) -> Text | None:
    parts = []
    if snapshot.get("loss") is not None:
        parts.append(f"loss {snapshot['loss']:.4f}")
    if snapshot.get("held_out_loss") is not None:
        held_out = f"held-out {snapshot['held_out_loss']:.4f}"
        if snapshot.get("unigram_entropy") is not None:
            held_out += f" (unigram entropy {snapshot['unigram_entropy']:.4f})"
        parts.append(held_out)
    if snapshot.get("tokens_per_s") is not None:
        parts.append(f"{snapshot['tokens_per_s']:,.0f} tokens/s")
    if snapshot.get("step_s") is not None:
        parts.append(f"{snapshot['step_s']:.3f} s per step")
    return Text("  ".join(parts)) if parts else None


def _restore_point(snapshot: Snapshot) -> Text | None:
    point = snapshot.get("restore_point")
    if not point:
        return None
    text = Text(f"{point.get('kind', 'checkpoint')} of step {point.get('step')}")
    if not point.get("verified", True):
        text.append(", not verified", style="yellow")
    step = snapshot.get("step")
    if isinstance(step, int) and isinstance(point.get("step"), int) and step > point["step"]:
        text.append(f"  {_count(step - point['step'], 'step')} ago", style="dim")
    if isinstance(snapshot.get("snapshot_step"), int):
        text.append(f"; snapshot in memory of step {snapshot['snapshot_step']}")
    every = [
        f"{kind} every {steps} steps"
        for kind, steps in (snapshot.get("every_steps") or {}).items()
        if isinstance(steps, int) and steps > 1
    ]
    if every:
        text.append(f"  ({', '.join(every)})", style="dim")
    return text


def _standby(snapshot: Snapshot) -> Text | None:
    """Whether the next generation is there, and what it costs."""
    standby = snapshot.get("standby")
    if not standby:
        return None
    if standby.get("disabled"):
        return Text("none any more: it failed too often", style="yellow")
    text = Text(f"generation {standby.get('generation')} ")
    if not standby.get("ready"):
        return text.append("is being prepared", style="yellow")
    text.append("is ready", style="green")
    costs = []
    if standby.get("memory_mb"):
        costs.append(f"{standby['memory_mb']:,.0f} MB")
    if standby.get("start_s"):
        costs.append(f"{standby['start_s']:.1f} s to start")
    return text.append(f"  {', '.join(costs)}", style="dim") if costs else text


def _budgets(snapshot: Snapshot) -> Text | None:
    """Those of which something is spent: {"worker": {"spent": 1, "limit": 10}}; -1 is no limit."""
    parts = []
    for cause, budget in (snapshot.get("budgets") or {}).items():
        if spent := budget.get("spent"):
            limit = budget.get("limit", -1)
            parts.append(f"{cause} {spent} of {limit}" if limit != -1 else f"{cause} {spent}")
    return Text(f"retries used: {', '.join(parts)}") if parts else None


def _trouble(snapshot: Snapshot) -> Text | None:
    """What an operator must know at once, while it lasts."""
    parts = []
    if snapshot.get("journal_lost_since"):
        since = clock(snapshot["journal_lost_since"])
        parts.append(f"the journal cannot be written since {since}: nothing is decided")
    if snapshot.get("heartbeat_store_lost_since"):
        since = clock(snapshot["heartbeat_store_lost_since"])
        parts.append(f"no heartbeat can be read since {since}: hangs are not noticed")
    for row in (snapshot.get("disk") or ())[:2]:
        where = f"{row.get('what')} of rank {row.get('rank')}"
        parts.append(f"no {where} on the disk since {clock(row.get('since'))}: {row.get('why')}")
    if snapshot.get("attention"):
        parts.append(str(snapshot["attention"]))
    if snapshot.get("drain_warning"):
        parts.append(str(snapshot["drain_warning"]))
    if keys := snapshot.get("settings_changed"):
        parts.append(f"changed, and counting when workers start anew: {', '.join(keys)}")
    if files := snapshot.get("code_changed"):
        parts.append(f"edited, and counting from the next run: {', '.join(files[:4])}")
    if found := snapshot.get("differences"):
        more = f"; {len(found) - 2} more in `status --json`" if len(found) > 2 else ""
        parts.append(f"not as it was: {'; '.join(found[:2])}{more}")
    if snapshot.get("retry_in_s"):
        parts.append(f"the next retry is in {snapshot['retry_in_s']:.0f} s")
    return Text("; ".join(parts), style="yellow") if parts else None


def _incident(snapshot: Snapshot) -> Text | None:
    incident = snapshot.get("incident")
    if not incident:
        return None
    number = incident.get("number")
    words = incident.get("story") or incident.get("cause") or incident.get("event") or ""
    text = Text(f"{number}: {words}" if number is not None else str(words))
    if incident.get("recovered_s") is not None:
        redone = incident.get("steps_redone")
        steps = "" if redone is None else f", {_count(redone, 'step')} redone"
        text.append(f"  recovered in {incident['recovered_s']:.1f} s{steps}", style="green")
    return text


def _last_event(snapshot: Snapshot) -> Text | None:
    event = snapshot.get("last_event")
    if not event:
        return None
    if not isinstance(event, Mapping):
        return Text(str(event))
    text = Text(f"{clock(event.get('at'))} {event.get('event', '')}")
    if event.get("why"):
        text.append(f"  {event['why']}", style="dim")
    return text


def _log_tail(snapshot: Snapshot) -> Text | None:
    """How the log of the culprit ends."""
    lines = [str(line) for line in (snapshot.get("log_tail") or ())[-_LOG_LINES:]]
    if not lines:
        return None
    text = "\n".join([f"{snapshot.get('log')} ends with", *lines])
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def _workers(workers: Sequence[Mapping[str, Any]], shown: int) -> RenderableType:
    """All workers, or of very many those that are furthest behind."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for heading in ("rank", "phase", "step", "beat", "pid", "host"):
        table.add_column(heading, justify="left" if heading in ("phase", "host") else "right")
    behind = sorted(workers, key=lambda worker: (worker.get("step") or 0, -_age(worker)))
    for worker in sorted(behind[:shown], key=lambda worker: worker.get("rank", 0)):
        age_s = worker.get("beat_age_s")
        table.add_row(
            str(worker.get("rank", "")),
            one_line(worker.get("phase") or "-"),
            "-" if worker.get("step") is None else f"{worker['step']:,}",
            "-" if age_s is None else f"{age_s:.1f} s ago",
            str(worker.get("pid") or "-"),
            one_line(worker.get("host") or worker.get("node") or "-", _HOST_LENGTH),
        )
    if len(workers) <= shown:
        return table
    rest = len(workers) - shown
    if shown == 0:
        return Text(f"{rest} workers: the terminal is too small for them", style="dim")
    return Group(table, Text(f"and {rest} more, none of them further behind", style="dim"))


def _age(worker: Mapping[str, Any]) -> float:
    return float(worker.get("beat_age_s") or 0.0)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def clock(at: object) -> str:
    """Seconds since the epoch as the local time of day; empty when unknown."""
    if not isinstance(at, int | float):
        return ""
    return time.strftime("%H:%M:%S", time.localtime(at))
