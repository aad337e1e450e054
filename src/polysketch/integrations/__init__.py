"""Where polysketch meets other libraries: transformers, peft, lm_eval, timm, diffusers. The rest imports none of it."""
