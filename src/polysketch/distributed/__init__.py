"""Work of many processes, on tensors alone: it knows no mechanism and no model."""

from typing import TYPE_CHECKING

from polysketch.distributed.launch import Launch, find_launch
from polysketch.distributed.mesh import Mesh, parse_mesh
from polysketch.distributed.watch import ToldByAnother
from polysketch.lazy import on_demand

if TYPE_CHECKING:
    from polysketch.distributed.context import ContextGroup
    from polysketch.distributed.folding import copies
    from polysketch.distributed.plan import ContextPlan
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "context": ["ContextGroup"],
            "folding": ["copies"],
            "plan": ["ContextPlan"],
        },
    )

__all__ = ["ContextGroup", "ContextPlan", "Launch", "Mesh", "ToldByAnother", "copies", "find_launch", "parse_mesh"]
