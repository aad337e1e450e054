"""`python -m polysketch` is the `polysketch` command."""

import sys

from polysketch.cli import main

if __name__ == "__main__":
    sys.exit(main())
