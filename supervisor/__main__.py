"""`python -m supervisor`: hands the arguments to the command line, and its status to the shell."""

import os
import sys

# Python puts the working directory first: a `queue.py` there would be taken for its own.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109, as Python writes it
    here = sys.path.pop(0)
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:  # noqa: PTH100, PTH120
        sys.path.append(here)  # run from its own sources, which nobody may have installed

from supervisor.cli import main

if __name__ == "__main__":
    sys.exit(main())
