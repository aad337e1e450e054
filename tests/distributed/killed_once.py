"""The command line, in a process that torchrun started; of its first start, rank 1 does not survive the second save."""

import os
import sys

from polysketch import cli
from polysketch.storage import disk

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    right, names = disk.write, []

    def write(path, data):
        names.append(path)
        if len(names) == 3:
            os.kill(os.getpid(), 9)
        right(path, data)

    disk.write = write

sys.exit(cli.main())
