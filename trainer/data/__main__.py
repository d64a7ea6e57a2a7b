"""`python -m trainer.data`: prepares the data of a job, see `trainer.prepare_data`."""

import sys

from trainer.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
