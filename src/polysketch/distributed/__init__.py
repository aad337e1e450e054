"""Work of many processes, on tensors alone: it knows no mechanism and no model."""

from typing import TYPE_CHECKING

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

__all__ = ["ContextGroup", "ContextPlan", "copies"]
