"""Studies of time: each row takes turns with what it is compared with, in one run on one machine."""
