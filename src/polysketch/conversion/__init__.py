"""Conversion of softmax models that people have to attention in less than quadratic time, and what that costs."""

from typing import TYPE_CHECKING

from polysketch.conversion.config import ConversionConfig
from polysketch.lazy import on_demand

if TYPE_CHECKING:
    from polysketch.conversion.procedure import ConversionResult, convert
    from polysketch.conversion.report import report_table
    from polysketch.conversion.transfer import AttentionTransfer, LayerTransfer
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "procedure": ["ConversionResult", "convert"],
            "report": ["report_table"],
            "transfer": ["AttentionTransfer", "LayerTransfer"],
        },
    )

__all__ = ["AttentionTransfer", "ConversionConfig", "ConversionResult", "LayerTransfer", "convert", "report_table"]
