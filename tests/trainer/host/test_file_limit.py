"""Descriptors: a thousand idle connections of a stranger end nothing."""

import subprocess
import sys

BECOME_RICH = """
import os, resource, select, socket, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
from trainer.host.processes import raise_file_limit
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (4096, 4096)
listener = socket.create_server(("127.0.0.1", 0), backlog=2000)
address = listener.getsockname()
held = [(socket.create_connection(address), listener.accept()[0]) for _ in range(400)]
# What knows small numbers only goes on as before: `select`, and programs that are started.
mine, other = held[0]
other.send(b"x")
assert select.select([mine], [], [], 1)[0] == [mine]
done = subprocess.run(["sh", "-c", "ulimit -n; ls /proc/self/fd | wc -l"], capture_output=True)
print(done.stdout.decode().split())
"""


def test_a_soft_limit_of_open_files_is_raised_and_nothing_else_changes() -> None:
    """1,500 idle connections to a gloo port were "Too many open files" and SIGABRT of a worker."""
    command = [sys.executable, "-c", BECOME_RICH]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "['4096', '4']", done.stderr
