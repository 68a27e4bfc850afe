"""`python -m ds4` is the `ds4-server` command."""

import sys

from ds4.cli import main

if __name__ == "__main__":
    sys.exit(main())
