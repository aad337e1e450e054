"""What a conversion is judged by: the loss on held-out text, by position, and how near attention came."""

from typing import Any

import numpy as np
import torch

from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.transfer import AttentionTransfer, LayerTransfer
from polysketch.data import PreparedData
from polysketch.evaluation import evaluate
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.models.modes import evaluation_mode
from polysketch.training.diagnostics import figures

_SPLIT = "validation"


def measure(model: Any, data: PreparedData, config: ConversionConfig) -> dict[str, Any]:
    """Loss, perplexity and loss by position on the first validation tokens, as JSON values.

    Args:
        model: the transformers model, in whatever state it is.
        data: has a validation split.
        config: gives context, number of tokens and batch.
    """
    result = evaluate(
        HuggingFaceLM(model),  # type: ignore[arg-type]
        data.split(_SPLIT).tokens,
        context_length=config.context,
        span=config.context,
        batch_size=config.batch_size // config.accumulation,
        token_bytes=data.tokenizer.token_bytes(),
        max_tokens=config.eval_tokens,
    )
    by_position = {
        "position_edges": result.position_edges.tolist(),
        "loss_by_position": result.loss_by_position.tolist(),
    }
    return figures(result) | by_position


def transfer_error(
    transfer: AttentionTransfer | LayerTransfer, model: Any, data: PreparedData, config: ConversionConfig
) -> dict[str, float]:
    """Layer -> its relative squared error in a transfer that the model takes part in, on one validation window."""
    window = np.asarray(data.split(_SPLIT).tokens[: config.context], dtype=np.int64)
    ids = torch.from_numpy(window)[None].to(next(model.parameters()).device)
    with evaluation_mode(model), torch.inference_mode():
        errors = transfer.errors(ids)
    return {str(layer): float(error) for layer, error in errors.items()}
