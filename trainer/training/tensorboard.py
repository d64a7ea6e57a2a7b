"""Scalars for TensorBoard, beside metrics.jsonl; what is done again replaces what was there."""

# mypy: allow-untyped-calls
# (tensorboardX and protobuf carry no types)
from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.host.tolerant_output import KEPT_MAX, OnChange
from trainer.settings import SettingsError


class Board:
    """An event file in a folder, from step `first` on; a point is in it when `write` returns.

    tensorboardX's own writer is two seconds late, which a kill would take away, or waits for the
    disk. While the disk refuses, the last points are kept in memory; `on_change` hears why.
    Raises `SettingsError` where tensorboardX is not installed.
    """

    def __init__(self, folder: Path, first: int, on_change: OnChange = lambda why: None) -> None:
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError as error:
            raise SettingsError(
                "[trainer] tensorboard = true needs the package tensorboardX: "
                "pip install 'everstep[dashboard]'"
            ) from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._checksum: Any = masked_crc32c
        name = f"{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
        self._path = folder / f"events.out.tfevents.{name}"
        self._on_change, self._failing = on_change, False
        self._kept: deque[bytes] = deque(maxlen=KEPT_MAX)
        self._written = 0
        self._append(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(event_pb2.Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """One point of each curve; `at` in seconds since 1970. Never raises OSError."""
        points = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        summary = self._summaries.Summary(value=points)
        self._append(self._events.Event(wall_time=at, step=step, summary=summary))

    def close(self) -> None:
        """Try once more to write what is still to be written."""
        self._flush()

    def _append(self, event: Any) -> None:
        """A record: length, checksum of it, the event, checksum of it."""
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        ends = [struct.pack("<I", self._checksum(part)) for part in (size, data)]
        self._kept.append(size + ends[0] + data + ends[1])
        self._flush()

    def _flush(self) -> None:
        why = ""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                while self._kept:
                    self._write(descriptor, self._kept[0])
                    self._kept.popleft()
            finally:
                os.close(descriptor)
        except OSError as error:
            why = f"{self._path}: {error.strerror}"
        if bool(why) != self._failing:
            self._failing = bool(why)
            self._on_change(why)

    def _write(self, descriptor: int, record: bytes) -> None:
        """At the end of the last whole record, whatever a full disk took of another."""
        if os.pwrite(descriptor, record, self._written) != len(record):
            os.ftruncate(descriptor, self._written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written += len(record)
