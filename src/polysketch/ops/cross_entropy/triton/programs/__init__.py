"""The programs: the only modules here that import Triton at module level."""
