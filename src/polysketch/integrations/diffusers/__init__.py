"""Models of diffusers with attention by a mechanism of this library, through their attention processors.

from polysketch.integrations.diffusers import attention_processors

unet.set_attn_processor(attention_processors(unet, "linear", kind="relu"))
"""

from polysketch.integrations.diffusers.choosing import attention_processors
from polysketch.integrations.diffusers.processor import MechanismProcessor

__all__ = ["MechanismProcessor", "attention_processors"]
