"""The programs themselves: the only modules that import Triton."""
