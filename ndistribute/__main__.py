"""Makes `python -m ndistribute` the same as the `ndistribute` command."""

import sys

from ndistribute.cli import main

if __name__ == "__main__":
    sys.exit(main())
