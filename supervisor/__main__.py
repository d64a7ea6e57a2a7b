"""`python -m supervisor`: hands the arguments to the command line, and its status to the shell."""

import sys

from supervisor.cli import main

if __name__ == "__main__":
    sys.exit(main())
