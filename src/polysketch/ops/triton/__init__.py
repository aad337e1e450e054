"""Programs in Triton for CUDA devices: how they are launched, configured and compiled. The programs lie beside.

Nothing here imports Triton until programs are asked about on a CUDA device: it is large, and absent on many machines.
"""

from polysketch.ops.triton.availability import why_not
from polysketch.ops.triton.configurations import configuration, forced
from polysketch.ops.triton.launch import launch, precision

__all__ = ["configuration", "forced", "launch", "precision", "why_not"]
