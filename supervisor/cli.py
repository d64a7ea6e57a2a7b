"""The command line: one function a command. Each returns the exit status; none decides anything.

Whatever is slow to import (the daemon, Ray) is imported by the command that needs it.
"""

import argparse
import json
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from supervisor.console.output import in_background
from supervisor.errors import EverstepError, NotRunning, OperatorError
from trainer.host.printable import make_tolerant, one_line, printable
from trainer.settings import SettingsError, read_settings
from trainer.wire import heartbeat
from trainer.wire.faults import KINDS

PHASES = tuple(phase for phase in heartbeat.PHASES if phase != "wait")
_DEFAULT_CONFIG = "job.toml"
_STOP_WAIT_S = 600.0
_STATUSES = """\
exit status of a run:
  0   COMPLETED
  2   the settings are wrong
  3   FAILED: a retry budget is exhausted
  4   FAILED: retrying cannot help (do not requeue)
  5   STOPPED by an operator (do not requeue; the same command resumes)
  70  a bug of ours
  73  another daemon runs this job
  75  STOPPED by a signal or preemption, or the cluster was out of reach and its workers
      were left alone (requeue: the same command resumes)

example:
  python -m supervisor --config job.toml --set trainer.steps=200
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    make_tolerant()
    try:
        options = _parser().parse_args(arguments)
    except BrokenPipeError:  # as below; help and version are printed while options are read
        return _flushed(0)
    except SystemExit as end:
        raise SystemExit(_flushed(int(end.code or 0))) from None
    with in_background() if options.command is run else nullcontext():
        return _status_of(options)


def _status_of(options: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        status = command(options)
    except SettingsError as error:
        for problem in error.problems:
            _say(problem, file=sys.stderr)
        return error.exit_status
    except EverstepError as error:
        _say(error, file=sys.stderr)
        # That files belong to another user says nothing about their job.
        is_refused = isinstance(error.__cause__, PermissionError) and command is not run
        return 1 if is_refused else error.exit_status
    except BrokenPipeError:  # the reader of our output has seen enough
        status = 0
    except OSError as error:
        what = error.filename or "the output cannot be written"
        _say(f"{what}: {error.strerror or error}{_whose(error)}", file=sys.stderr)
        status = 4 if command is run else 1
    except KeyboardInterrupt:
        return 75 if command is run else 130
    except Exception:
        _say(traceback.format_exc().rstrip(), file=sys.stderr)
        print("This is a bug of everstep; please report the lines above.", file=sys.stderr)
        return 70
    return _flushed(status)


def _flushed(status: int) -> int:
    """Write out what is left, so that a closed or full destination is noticed here, not at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
            return status or 1
    return status


# ------------------------------------------------------------------------------- commands


def run(options: argparse.Namespace) -> int:
    """Run the job in the foreground until it ends."""
    from supervisor.config import Settings, job_directory
    from supervisor.console.output import appended, errors_beside
    from supervisor.daemon.signals import ignore
    from supervisor.disk.run_directory import open_directory, why_unusable
    from supervisor.errors import DiskError
    from supervisor.log import LOG_FILE, configure
    from trainer.host.processes import raise_file_limit

    raise_file_limit()
    os.umask(0o077)  # whatever a run leaves is its owner's, and so is what our children leave
    config_path = Path(options.config).resolve()
    from supervisor.console.preflight import with_address

    settings, origins = read_settings(Settings, options.config, options.set)
    settings = with_address(settings)
    terminal = sys.stdout.isatty() and options.log is None
    form = options.log or settings.control.log
    run_dir = job_directory(settings.job, config_path)
    if why := why_unusable(run_dir):
        raise SettingsError(why)
    if options.fresh:
        from supervisor.console.jobs import set_aside

        if earlier := set_aside(run_dir):
            print(f"Starting over; the earlier run is kept in {earlier}", file=sys.stderr)
    with ExitStack() as stack:
        if terminal:
            try:
                open_directory(run_dir)
                log = stack.enter_context(appended(run_dir / LOG_FILE))
                stack.enter_context(errors_beside(run_dir / LOG_FILE))
            except OSError as error:
                raise DiskError(
                    f"{run_dir} cannot be written ({error.strerror}); set job.run_dir to a place "
                    "that can"
                ) from error
        if terminal:
            configure(log)
        else:
            configure(sys.stdout, form)

        import asyncio

        from supervisor.assembly import run_daemon

        status: int = asyncio.run(
            run_daemon(
                settings,
                origins,
                config_path,
                terminal,
                take_over=options.take_over,
                keep_code=options.keep_code,
            )
        )
        if terminal or form == "plain":
            _print_result(run_dir)
        else:
            _log_result(run_dir)
    ignore()
    return status


def check(options: argparse.Namespace) -> int:
    """Validate the settings and print what is in force, and where each value came from."""
    from supervisor.config import (
        Settings,
        describe,
        effective,
        job_directory,
        reference,
        template,
    )
    from supervisor.console.preflight import with_address
    from supervisor.disk.run_directory import why_short_lived

    if options.defaults or options.reference:
        print(template() if options.defaults else reference(), end="")
        return 0
    try:
        settings, origins = read_settings(Settings, options.config, options.set)
        settings = with_address(settings)
    except SettingsError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": error.problems}, indent=2))
        return error.exit_status
    rows = effective(settings, origins)
    run_dir = job_directory(settings.job, options.config)
    found = _missing(settings, options.config, run_dir)
    if found and options.json:
        print(json.dumps({"ok": False, "problems": found}, indent=2))
        return SettingsError.exit_status
    if found:
        _say(f"{describe(rows)}\n")
        raise SettingsError(*found)
    if options.memory and options.json:
        return _predict_memory(settings, options)
    variables = _variables_of_workers(settings)
    if options.json:
        fine = {"ok": True, "run_dir": str(run_dir), "settings": rows}
        print(json.dumps({**fine, "worker_environment": variables}, indent=2))
    else:
        _say(describe(rows))
        whose = "this command" if settings.cluster.address == "local" else "the Ray of their node"
        _say(f"\nWorkers have the environment of {whose}, and these variables:")
        _say("\n".join(f"  {name}={text}" for name, text in sorted(variables.items())))
        _say(f"\nThe settings are fine. Files go to {run_dir}")
        if why := why_short_lived(run_dir):
            _say(f"But: {why}.")
    return _predict_memory(settings, options) if options.memory else 0


def _variables_of_workers(settings: Any) -> dict[str, str]:
    """What a worker's environment has, whatever it is started from."""
    from trainer.host.environment import worker_environment

    cluster = settings.cluster
    return worker_environment(
        cluster.cpus_per_worker, cluster.gpus_per_worker, settings.trainer.env
    )


def _missing(settings: Any, config: str, run_dir: Path) -> list[str]:
    """What a start would fail on: a place, code, data, servers and devices that are not there."""
    from supervisor.console.preflight import problems
    from supervisor.disk.run_directory import why_unusable
    from supervisor.health.store_address import take_password

    found = problems(settings, Path(config).resolve().parent, take_password())
    return [*filter(None, [why_unusable(run_dir)]), *found]


def _predict_memory(settings: Any, options: argparse.Namespace) -> int:
    """In a process of its own: JAX does not belong into this one, nor does the user's task."""
    import subprocess

    from supervisor.console.preflight import why_no_snapshots
    from trainer.predict_memory import LIMIT_S, environment_for

    devices = settings.cluster.workers * max(1, settings.cluster.gpus_per_worker)
    command = [sys.executable, "-P", "-m", "trainer.predict_memory"]
    command += ["--config", str(options.config)] if options.config else []
    for override in options.set:
        command += ["--set", override]
    try:
        told = subprocess.run(
            command,
            check=False,
            env={**environment_for(devices), **settings.trainer.env},
            stdout=subprocess.PIPE,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise OperatorError(f"the step was not compiled within {LIMIT_S:g} s") from None
    if told.returncode:  # it has said why
        return told.returncode if told.returncode > 0 else 1
    found = json.loads(told.stdout.splitlines()[-1])
    if options.json:
        print(json.dumps(found))
        return 0
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items())
    print(
        f"Memory a device, of {devices} as {mesh}: {found['state'] / 1e6:,.1f} MB of state, "
        f"{found['peak'] / 1e6:,.1f} MB at the peak of a step (as compiled for CPU)"
    )
    if why := why_no_snapshots(settings, found["snapshots"]):
        print(why)
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the state of the job: asked of its daemon, or read from its files."""
    from supervisor.console.control import ask
    from supervisor.console.status_from_files import recorded_status

    run_dir = _run_dir(options)
    try:
        snapshot: dict[str, Any] | None = ask(run_dir, {"command": "status"})
        assert snapshot is not None
        snapshot.pop("ok")
    except NotRunning as error:
        if _is_held(run_dir):  # alive but silent is not the same as gone
            _say(f"{error}; what follows is from its files", file=sys.stderr)
        snapshot = recorded_status(run_dir)
    if snapshot is None:
        raise OperatorError(f"{run_dir}: no job has run here")
    if options.json:
        print(json.dumps(snapshot, indent=2, default=str))
    else:
        from rich.console import Console

        from supervisor.console.display import render

        Console().print(render(snapshot))
    return 0


def events(options: argparse.Namespace) -> int:
    """Print the decisions of the job's journal, oldest first."""
    from supervisor.console.narrate import tell
    from supervisor.console.status_from_files import JOURNAL_FILE
    from supervisor.record.journal import read_history

    path = _run_dir(options) / JOURNAL_FILE
    if not path.exists() and not options.follow:
        raise OperatorError(f"{path}: no job has run here")
    last = 0
    seen = (-1, -1)
    while True:
        # Another file under the same name: the journal has rolled over, or another daemon took it.
        if path.exists() and (now := (path.stat().st_ino, path.stat().st_size)) != seen:
            seen = now
            for record in read_history(path, after=last):
                last = record["seq"]
                text = json.dumps(record, default=str) if options.json else tell(record)
                if text is not None:
                    print(text, flush=True)
        if not options.follow:
            if last == 0:
                raise OperatorError(f"{path} is empty: nothing was ever decided here")
            return 0
        time.sleep(0.2)


def replay(options: argparse.Namespace) -> int:
    """Run the recorded events through the state machine again; status 1 at the first difference."""
    from supervisor.console.status_from_files import JOURNAL_FILE
    from supervisor.record.replay import replay_file

    path = Path(options.file) if options.file else _run_dir(options) / JOURNAL_FILE
    if not path.is_file():
        raise OperatorError(f"{path}: there is no such journal")
    report = replay_file(path)
    if report.segments == 0:
        raise OperatorError(f"{path} is empty: nothing was ever decided here")
    if options.json:
        found = {"file": str(path), "moves": report.moves, "state": report.state}
        found |= {"difference": report.difference or None, "notes": list(report.notes)}
        print(json.dumps(found, indent=2))
    else:
        for note in report.notes:
            _say(note)
        _say(f"{path}: {report.moves} moves, {'a' if report.difference else 'no'} difference")
        if report.difference:
            _say(report.difference)
    return 1 if report.difference else 0


def graph(options: argparse.Namespace) -> int:
    """Print the state machine as Markdown with a Mermaid diagram, made from the table that runs."""
    from supervisor.fsm.render import insert, render

    if options.write is not None:
        path = Path(options.write)
        try:
            path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise OperatorError(f"{path} cannot be refreshed: {error}") from error
        return 0
    text = render()
    print(json.dumps({"markdown": text}) if options.json else text)
    return 0


def runs(options: argparse.Namespace) -> int:
    """List the jobs below the directory of this one: state, step and loss as their files say."""
    from supervisor.console.jobs import list_jobs

    parent = _place(options).parent
    rows = list_jobs(parent)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        raise OperatorError(f"{parent}: no job has run here")
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("job", "state", "generation", "step", "loss"):
        table.add_column(heading, justify="left" if heading in ("job", "state") else "right")
    for row in rows:
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        step = "-" if row["step"] is None else f"{row['step']:,}"
        has_ended = row["state"] in ("COMPLETED", "FAILED", "STOPPED")
        state = row["state"] or "-"
        state += "" if row["running"] or has_ended else " (no daemon)"
        if row["problem"]:
            state = f"not readable: {row['problem']}"
        generation = "-" if row["generation"] is None else str(row["generation"])
        cells = (row["job"], state, generation, step, loss)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console().print(table)
    return 0


def stop(options: argparse.Namespace) -> int:
    """Ask the daemon to save and stop, or with --now to end the workers at once."""
    from supervisor.console.control import ask
    from supervisor.console.status_from_files import read_result

    run_dir = _run_dir(options)
    answer = ask(run_dir, {"command": "stop", "now": options.now})
    if answer.get("message"):
        _say(answer["message"], file=sys.stderr)
    if not options.wait:
        print("The order is accepted; `status` shows how far it is.")
        return 0
    give_up_at = time.monotonic() + options.timeout
    while _is_held(run_dir):
        if time.monotonic() > give_up_at:
            raise NotRunning(f"the daemon still runs after {options.timeout:g} s; see `status`")
        time.sleep(0.1)
    result = read_result(run_dir)
    if result is None:
        raise OperatorError(f"the daemon ended without a result; see {run_dir}")
    _print_result(run_dir)
    return 0


def fault(options: argparse.Namespace) -> int:
    """Strike one worker, to see the job recover."""
    from supervisor.console.control import ask

    request = {"command": "fault"}
    for name in ("rank", "kind", "phase", "step", "seconds"):
        request[name] = getattr(options, name)
    answer = ask(_run_dir(options), request)
    when = "".join(
        f" {word} {value}"
        for word, value in (("in phase", options.phase), ("at step", options.step))
        if value is not None
    )
    _say(answer.get("message") or f"Rank {options.rank}: {options.kind}{when or ' now'}.")
    return 0


# ------------------------------------------------------------------------------- helpers


def _run_dir(options: argparse.Namespace) -> Path:
    """`<run_dir>/<job>` as `_place` finds it. Raises OperatorError if it holds what is no file."""
    from supervisor.disk.run_directory import require_plain_files

    run_dir = _place(options)
    require_plain_files(run_dir)
    return run_dir


def _place(options: argparse.Namespace) -> Path:
    """`<run_dir>/<job>`, given by --run or found through the settings."""
    if options.run is not None:
        return Path(options.run).resolve()
    from supervisor.config import Location, job_directory

    location, _ = read_settings(Location, options.config, options.set)
    return job_directory(location.job, options.config)


def _is_held(run_dir: Path) -> bool:
    from supervisor.daemon.lock import is_held

    return is_held(run_dir)


def _whose(error: OSError) -> str:
    """To whom the place belongs that cannot be read, if that is another user."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return ""
    path = Path(os.fsdecode(error.filename))
    for place in (path, *path.parents):
        with suppress(OSError):
            owner = place.stat().st_uid
            return "" if owner == os.geteuid() else f"; {place} belongs to user {owner}"
    return ""


def _say(text: object, file: TextIO | None = None) -> None:
    """Print what may hold text from outside; it must not act on the terminal."""
    print(printable(text), file=file or sys.stdout)


def _print_result(run_dir: Path) -> None:
    from supervisor.console.status_from_files import read_result

    result = read_result(run_dir)
    if result is None:
        return
    step = "" if result.get("step") is None else f" at step {result['step']}"
    reason = f": {one_line(result['reason'])}" if result.get("reason") else ""
    _say(f"{result.get('state')}{step}{reason}")
    if result.get("state") == "STOPPED":
        _say("The command that started it goes on from there.")
    if result.get("steps_lost"):
        _say(f"Steps that were done after it and not saved: {result['steps_lost']}")
    if result.get("traceback"):
        _say(textwrap.indent(str(result["traceback"]), "  "))
    if result.get("log_tail"):
        _say(f"The last lines of {result.get('log')}:")
        _say("\n".join(f"  {line}" for line in result["log_tail"]))
    if result.get("remedy"):
        _say(f"To do: {result['remedy']}")
    _say(f"Files: {run_dir}")


def _log_result(run_dir: Path) -> None:
    """Log how the job ended, so that a program needs no other file to raise an alarm."""
    import structlog

    from supervisor.console.status_from_files import read_result

    if (result := read_result(run_dir)) is None:
        return
    names = ("state", "exit_status", "reason", "step", "steps_lost", "traceback", "remedy")
    facts = {name: result[name] for name in names if result.get(name) is not None}
    log = structlog.get_logger()
    say = log.error if result.get("state") == "FAILED" else log.info
    say("job_ended", **facts, run_dir=str(run_dir))


# ------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m supervisor",
        description="Keeps a distributed JAX training job stepping. Without a command it runs the "
        "job in the foreground; the same command resumes it.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run, run=None)
    _add_settings(parser, default=True)
    _add_running(parser, default=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    one = _add(commands, "run", run, "run the job (the default)", "run --set trainer.steps=200")
    _add_settings(one)
    _add_running(one)
    one = _add(commands, "check", check, "validate the settings", "check --config job.toml")
    _add_settings(one)
    _add_json(one)
    one.add_argument(
        "--defaults", action="store_true", help="print an annotated file of all defaults instead"
    )
    one.add_argument(
        "--reference", action="store_true", help="print all settings as a page in Markdown instead"
    )
    one.add_argument(
        "--memory", action="store_true", help="compile the step, tell what a device will hold"
    )
    one = _add(commands, "status", status, "how the job is doing", "status --json")
    _add_place(one)
    _add_json(one)
    one = _add(commands, "events", events, "what was decided, and why", "events --follow")
    _add_place(one)
    _add_json(one)
    one.add_argument("--follow", action="store_true", help="go on as lines are added")
    one = _add(commands, "replay", replay, "run a journal again", "replay runs/first/journal.jsonl")
    one.add_argument("file", nargs="?", metavar="FILE", help="a journal; the job's if left out")
    _add_place(one)
    _add_json(one)
    one = _add(commands, "graph", graph, "the state machine as a diagram", "graph > machine.md")
    _add_json(one)
    one.add_argument(
        "--write", metavar="FILE", help="refresh the generated block between FILE's markers"
    )
    one = _add(commands, "runs", runs, "the jobs beside this one", "runs --json")
    _add_place(one)
    _add_json(one)
    _add_stop(commands)
    _add_fault(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it, and end."""
        from importlib.metadata import version

        print(f"everstep {version('everstep')}")
        parser.exit()


def _add_stop(commands: Any) -> None:
    one = _add(commands, "stop", stop, "save and stop the job", "stop --config job.toml")
    _add_place(one)
    one.add_argument("--now", action="store_true", help="end the workers at once, without saving")
    one.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="until the daemon is gone (the default)",
    )
    one.add_argument(
        "--timeout",
        type=float,
        default=_STOP_WAIT_S,
        metavar="SECONDS",
        help=f"wait at most so long (default {_STOP_WAIT_S:g})",
    )


def _add_fault(commands: Any) -> None:
    one = _add(commands, "fault", fault, "a drill: strike one worker", "fault --rank 1 --kind kill")
    _add_place(one)
    one.add_argument("--rank", type=int, required=True, help="the worker to strike, from 0")
    one.add_argument(
        "--kind",
        choices=KINDS,
        required=True,
        help="kill: SIGKILL; stop: SIGSTOP, so that it hangs; raise: an exception; segfault: "
        "SIGSEGV; exit: it leaves with status 0; hold-gil: its interpreter hangs; allocate: it "
        "runs out of memory; sleep: its loop sleeps; flip-bit: a bit of its state changes",
    )
    one.add_argument("--phase", choices=PHASES, help="strike when it next enters this phase")
    one.add_argument("--step", type=int, help="strike at this step, from 0")
    one.add_argument("--seconds", type=float, help="sleep so long (for ever if left out)")


def _add(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=command.__doc__,
        epilog=f"example:\n  python -m supervisor {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    return parser


def _add_settings(parser: argparse.ArgumentParser | Any, *, default: bool = False) -> None:
    # Options may stand before or after the command: only the outer parser has defaults.
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=_DEFAULT_CONFIG if default else argparse.SUPPRESS,
        help=f"the file of settings (default {_DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[] if default else argparse.SUPPRESS,
        help="override a setting, VALUE in TOML; repeatable",
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser)
    parser.add_argument("--run", metavar="DIR", help="the job's directory, instead of --config")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="an answer for programs")


def _add_running(parser: argparse.ArgumentParser, *, default: bool | None = None) -> None:
    unset = argparse.SUPPRESS if default is None else None
    parser.add_argument(
        "--log",
        choices=("plain", "json"),
        default=unset,
        help="log lines instead of the panel, also on a terminal: plain for people, or json for "
        "programs; off a terminal control.log counts if left out (plain)",
    )
    parser.add_argument(
        "--plain",
        dest="log",
        action="store_const",
        const="plain",
        default=unset,
        help="the same as --log plain",
    )
    for name, text in (
        (
            "--take-over",
            (
                "end the daemon that holds the job on this machine, frozen or not, and go on with "
                "its workers"
            ),
        ),
        (
            "--keep-code",
            "go on with the copy of your code that the last run had, whatever was edited since",
        ),
        (
            "--fresh",
            "start over from the seed; what an ended job has left is moved aside",
        ),
    ):
        parser.add_argument(
            name,
            action="store_true",
            default=argparse.SUPPRESS if default is None else default,
            help=text,
        )
