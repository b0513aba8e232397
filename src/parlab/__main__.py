"""python -m parlab: the command `parlab`."""

import sys

from parlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
