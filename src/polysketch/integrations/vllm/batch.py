"""What vLLM tells of the requests of a step, in the form that our layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from polysketch.integrations.vllm import BACKEND
from polysketch.integrations.vllm.rows import Rows, rows_of


@dataclass(frozen=True)
class StateBatch:
    """The requests of a step.

    Attributes:
        rows: in the order of their tokens.
    """

    rows: list[Rows]


class StateBackend(AttentionBackend):
    """How vLLM finds `StateBatchBuilder`."""

    @staticmethod
    def get_name() -> str:
        """The name it is registered by."""
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[StateBatchBuilder]:
        """What makes a `StateBatch`."""
        return StateBatchBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether it keeps a state, not keys and values."""
        return True


class StateBatchBuilder(AttentionMetadataBuilder[StateBatch]):
    """Makes the `StateBatch` of a step.

    Requests with one new token come first, and are then a batch of one step.
    """

    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateBatch:
        """Of vLLM's own record of the step; on a device the pages are brought to host memory."""
        common = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )[:, 0].tolist()
        seen = common.seq_lens.cpu() if common.seq_lens_cpu_upper_bound is None else common.seq_lens_cpu_upper_bound
        return StateBatch(rows_of(common.query_start_loc_cpu.tolist(), seen.tolist(), pages))
