"""Continue prompts: sampling, `generate`, an engine for many requests. Token ids; text is made of them at the end."""

from polysketch.generation.batching import Engine
from polysketch.generation.beams import Beam, BeamSearchResult, beam_search
from polysketch.generation.conversation import load_conversation, save_conversation
from polysketch.generation.drafts import AssistantDrafts, Drafter, PromptLookup, generate_with_drafts
from polysketch.generation.engine import GenerationResult, generate
from polysketch.generation.requests import Event, Request
from polysketch.generation.sampling import Sampler, draw, keep_top_k, keep_top_p, penalize_repetition, tokens_seen
from polysketch.generation.slots import bytes_of_request
from polysketch.generation.snapshots import Snapshots
from polysketch.generation.text_stream import TextStream

__all__ = [
    "AssistantDrafts",
    "Beam",
    "BeamSearchResult",
    "Drafter",
    "Engine",
    "Event",
    "GenerationResult",
    "PromptLookup",
    "Request",
    "Sampler",
    "Snapshots",
    "TextStream",
    "beam_search",
    "bytes_of_request",
    "draw",
    "generate",
    "generate_with_drafts",
    "keep_top_k",
    "keep_top_p",
    "load_conversation",
    "penalize_repetition",
    "save_conversation",
    "tokens_seen",
]
