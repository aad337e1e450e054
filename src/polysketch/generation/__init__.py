"""Continue prompts: sampling, `generate`, an engine for many requests. Token ids; text is made of them at the end."""

from polysketch.generation.batching import Engine
from polysketch.generation.conversation import load_conversation, save_conversation
from polysketch.generation.engine import GenerationResult, generate
from polysketch.generation.requests import Event, Request
from polysketch.generation.sampling import Sampler, draw, keep_top_k, keep_top_p
from polysketch.generation.slots import bytes_of_request
from polysketch.generation.snapshots import Snapshots
from polysketch.generation.text_stream import TextStream

__all__ = [
    "Engine",
    "Event",
    "GenerationResult",
    "Request",
    "Sampler",
    "Snapshots",
    "TextStream",
    "bytes_of_request",
    "draw",
    "generate",
    "keep_top_k",
    "keep_top_p",
    "load_conversation",
    "save_conversation",
]
