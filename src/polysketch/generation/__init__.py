"""Continue prompts: sampling and the generation engine. Token ids only; text is the business of `data` and `cli`."""

from polysketch.generation.engine import GenerationResult, generate
from polysketch.generation.sampling import Sampler, draw, keep_top_k, keep_top_p

__all__ = ["GenerationResult", "Sampler", "draw", "generate", "keep_top_k", "keep_top_p"]
