"""Our attention processor in tiny random models of diffusers: softmax is their own, relu features are SANA's."""

import pytest
import torch

from polysketch.attention import MECHANISMS

pytest.importorskip("diffusers", reason="diffusers is not installed here: make test-vision brings it")

from diffusers import HunyuanDiT2DModel, SanaTransformer2DModel, StableAudioDiTModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

from polysketch.integrations.diffusers import MechanismProcessor, attention_processors

SELF = [name for name, kind in MECHANISMS.items() if kind.is_bidirectional]
LAYERS = [
    {},
    {"bias": True, "qk_norm": "layer_norm", "cross_attention_dim": 10},
    {"kv_heads": 2, "qk_norm": "rms_norm_across_heads", "rescale_output_factor": 2.0},
    {"norm_num_groups": 4, "residual_connection": True},
    {"cross_attention_dim": 10, "cross_attention_norm": "layer_norm", "qk_norm": "l2"},
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=2,
        norm_num_groups=4,
    ).double()


def sana() -> SanaTransformer2DModel:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 4, "num_cross_attention_heads": 2}
    crossing = {"cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 6}
    return SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, sample_size=4, qk_norm="rms_norm_across_heads", **sizes, **crossing
    ).double()


def hunyuan() -> HunyuanDiT2DModel:
    widths = {"hidden_size": 24, "cross_attention_dim": 8, "cross_attention_dim_t5": 8, "pooled_projection_dim": 4}
    return HunyuanDiT2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, sample_size=16, patch_size=2, num_layers=2, **widths
    )


def stable_audio() -> StableAudioDiTModel:
    sizes = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_attention_heads": 2}
    widths = {"cross_attention_dim": 16, "cross_attention_input_dim": 16, "global_states_input_dim": 16}
    return StableAudioDiTModel(**sizes, **heads, **widths, time_proj_dim=8)


def asked(model, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The output of a model for a picture, a time and a text of five tokens."""
    text = normal(2, 5, 6 if isinstance(model, SanaTransformer2DModel) else 12)
    given = {"timestep": torch.tensor([3, 7]), "encoder_attention_mask": mask}
    return model(
        normal(2, 4, 8, 8)[..., : model.config.sample_size, : model.config.sample_size],
        **given,
        encoder_hidden_states=text,
    ).sample


def padding() -> torch.Tensor:
    return torch.tensor([[True, True, False, True, False], [True] * 5])


@pytest.mark.parametrize("options", LAYERS, ids=lambda options: "-".join(options) or "plain")
def test_a_layer_of_softmax_is_that_of_diffusers(options):
    torch.manual_seed(0)
    layer = Attention(query_dim=8, heads=2, dim_head=4, **options).double()
    source = normal(2, 5, 10) if "cross_attention_dim" in options else None
    shape = (2, 8, 3, 2) if "norm_num_groups" in options else (2, 6, 8)
    mask = None if source is None else torch.zeros(2, 1, 5, dtype=torch.float64).masked_fill(~padding()[:, None], -1e4)
    given = {"encoder_hidden_states": source, "attention_mask": mask}
    layer.set_processor(AttnProcessor2_0())
    if "qk_norm" in options and "across" in options["qk_norm"]:
        for norm in (layer.norm_q, layer.norm_k):
            torch.nn.init.normal_(norm.weight)
        ours = processor(layer)
        expected = across_heads(layer, normal(*shape))
    else:
        ours, expected = processor(layer), layer(normal(*shape), **given)
    layer.set_processor(ours)
    torch.testing.assert_close(layer(normal(*shape), **given), expected)


def processor(layer: Attention) -> MechanismProcessor:
    mechanism = MECHANISMS["softmax"](layer.heads, layer.inner_dim // layer.heads, layer.inner_kv_dim // 4)
    return MechanismProcessor(mechanism)


def across_heads(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """What a norm of all heads together means; the processor of diffusers norms each head."""
    query, key = layer.norm_q(layer.to_q(x)), layer.norm_k(layer.to_k(x))
    heads = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (query, key, layer.to_v(x)))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads)
    return layer.to_out[0](attended.transpose(1, 2).flatten(2)) / layer.rescale_output_factor


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
def test_a_unet_of_softmax_is_that_of_diffusers(mask):
    model = unet()
    expected = asked(model, mask)
    model.set_attn_processor(attention_processors(model, "softmax", layers="all"))
    assert all(isinstance(each, MechanismProcessor) for each in model.attn_processors.values())
    torch.testing.assert_close(asked(model, mask), expected)
    if mask is not None:
        assert (asked(model) - expected).abs().max() > 1e-4


def test_relu_features_are_sanas_attention_and_softmax_its_cross_attention():
    model = sana()
    expected = asked(model, padding())
    model.set_attn_processor(attention_processors(model, "linear", kind="relu"))
    torch.testing.assert_close(asked(model, padding()), expected, rtol=1e-5, atol=1e-6)  # theirs is in float32 inside
    model.set_attn_processor(attention_processors(model, "softmax", layers="cross"))
    torch.testing.assert_close(asked(model, padding()), expected, rtol=1e-5, atol=1e-6)
    model.set_attn_processor(attention_processors(model, "linear", kind="elu"))
    assert (asked(model, padding()) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", SELF)
def test_every_mechanism_attends_in_a_unet_and_its_weights_are_the_models(name):
    model = unet()
    before = asked(model)
    count = len(list(model.parameters()))
    model.set_attn_processor(attention_processors(model, name))
    own = [each for each in model.attn_processors.values() if isinstance(each, MechanismProcessor)]
    assert len(own) == len(model.attn_processors) / 2
    assert len(list(model.parameters())) == count + sum(len(list(each.parameters())) for each in own)
    output = asked(model)
    output.square().sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    exact = name in ("softmax", "hyper", "sliding-window")  # in a picture of 16 tokens
    assert ((output - before).abs().max() > 1e-6) != exact


WRONG = [
    (lambda: attention_processors(unet(), "nope"), "unknown attention mechanism 'nope'"),
    (lambda: attention_processors(unet(), "linear", kin="elu"), "has no option 'kin'"),
    (lambda: attention_processors(unet(), "polysketch"), "'polysketch' is causal only, and here all tokens see one"),
    (lambda: attention_processors(unet(), "linear", layers="some"), "expected layers 'self', 'cross' or 'all', found"),
    (lambda: attention_processors(torch.nn.Linear(2, 2), "linear"), "expected a model of diffusers .* found Linear"),
    (lambda: attention_processors(unet(), "focused", layers="all"), "of the same tokens: .*that can: softmax, "),
    (
        lambda: attention_processors(hunyuan(), "softmax"),
        r"at blocks\.0\.attn1\.processor, found HunyuanAttnProcessor2_0",
    ),
    (lambda: attention_processors(stable_audio(), "linear"), "found StableAudioAttnProcessor2_0, which may do more"),
    (
        lambda: processor(Attention(8, heads=2, dim_head=4))(
            Attention(8, heads=2, dim_head=4), torch.zeros(2, 6, 8), attention_mask=torch.zeros(2, 6, 6)
        ),
        "expected a mask that hides the same keys from every head and query, of 2 rows and 6 keys",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_does_not_fit_is_told_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as found:
        make()
    assert "\n" not in str(found.value)
