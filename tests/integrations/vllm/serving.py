"""vLLM's engine in the process of the tests, step by step, and our own to compare with."""

import gc
import itertools
from pathlib import Path
from typing import Any

from polysketch.generation import generate
from polysketch.models import TransformerLM

CHUNK, BLOCK = 48, 32
"""Tokens of a step, and tokens between two kept states."""


class Engine:
    """vLLM in this process, on a model that is written to a folder first."""

    def __init__(self, model: TransformerLM, folder: Path, **options: Any) -> None:
        from vllm import LLM

        from polysketch.integrations.huggingface import PolysketchForCausalLM

        PolysketchForCausalLM.from_transformer(model).save_pretrained(folder)
        given = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": 512, "dtype": "float32"}
        self.model = model
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=2**28,
            **{"block_size": BLOCK, **given, **options},
        )
        self.names = (str(number) for number in itertools.count())

    @property
    def scheduler(self) -> Any:
        """Of the engine, which runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def serve(
        self,
        texts: list[list[int]],
        lengths: list[int],
        *,
        every: int = 0,
        cancelled: dict[int, int] | None = None,
        driven_out: tuple[int, ...] = (),
    ) -> dict[int, tuple[list[int], int]]:
        """Greedy tokens of each text, and how many of its tokens were found in the cache.

        Args:
            texts: prompts.
            lengths: new tokens of each.
            every: steps between the arrival of one and the next.
            cancelled: request -> the step after which it is cancelled.
            driven_out: steps after which all requests lose their states, and begin anew.
        """
        from vllm import SamplingParams

        engine, found, names = self.llm.llm_engine, {}, {}
        for step in itertools.count():
            while len(names) < len(texts) and step >= every * len(names):
                request, name = len(names), next(self.names)
                wanted = SamplingParams(temperature=0, max_tokens=lengths[request], ignore_eos=True, detokenize=False)
                engine.add_request(name, {"prompt_token_ids": texts[request]}, wanted)
                names[name] = request
            for output in engine.step():
                if output.finished:
                    found[names[output.request_id]] = (list(output.outputs[0].token_ids), output.num_cached_tokens)
            engine.abort_request([name for name, request in names.items() if (cancelled or {}).get(request) == step])
            if step in driven_out:
                self.llm.reset_prefix_cache(reset_running_requests=True)
            if len(names) == len(texts) and not engine.has_unfinished_requests():
                return found
        raise AssertionError

    def expected(self, text: list[int], length: int) -> list[int]:
        """By our own engine, alone."""
        return generate(self.model, [text], max_new_tokens=length, temperature=0).tokens[0]

    def close(self) -> None:
        """Make room for another one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def agree(engine: Engine, texts: list[list[int]], lengths: list[int], **how: Any) -> dict[int, tuple[list[int], int]]:
    """Serve, and compare every request that was not cancelled."""
    engine.llm.reset_prefix_cache()
    found = engine.serve(texts, lengths, **how)
    assert found.keys() == set(range(len(texts))) - (how.get("cancelled") or {}).keys()
    for request, (tokens, _) in found.items():
        assert tokens == engine.expected(texts[request], lengths[request]), f"request {request}"
    return found
