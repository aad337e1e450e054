"""The programs of attention within a window; the only modules of this op that import Triton."""
