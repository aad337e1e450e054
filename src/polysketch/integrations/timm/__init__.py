"""Vision transformers of timm with attention by a mechanism of this library.

from timm.models import VisionTransformer
from polysketch.integrations.timm import attention_layer, replace_attention

model = VisionTransformer(img_size=64, patch_size=8, attn_layer=attention_layer("focused", grid=(8, 8)))
replace_attention(pretrained, "polysketch-paper", local_chunk=64)
"""

from polysketch.integrations.timm.layer import MechanismAttention, attention_layer
from polysketch.integrations.timm.replace import replace_attention

__all__ = ["MechanismAttention", "attention_layer", "replace_attention"]
