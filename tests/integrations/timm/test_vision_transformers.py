"""Vision transformers of timm with our attention: softmax gives what timm's own gives, every mechanism trains."""

import copy

import pytest
import torch

from polysketch.attention import MECHANISMS

timm = pytest.importorskip("timm", reason="timm is not installed here: make test-vision brings it")

from timm.layers import Attention  # noqa: E402
from timm.models import VisionTransformer  # noqa: E402

from polysketch.integrations.timm import MechanismAttention, attention_layer, replace_attention  # noqa: E402

BOTH_SIDES = [name for name, kind in MECHANISMS.items() if kind.is_bidirectional]
GRID = (4, 3)
SIZES = {"img_size": (32, 24), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
LAYERS = [
    {},
    {"qkv_bias": True, "qk_norm": True, "norm_layer": torch.nn.LayerNorm},
    {"scale_norm": True, "norm_layer": torch.nn.LayerNorm, "proj_bias": False},
    {"attn_head_dim": 8, "dim_out": 20, "gated": True},
]


def transformer(**changes) -> VisionTransformer:
    """A small one, in float64, its weights far from where they start, so that attention looks at what it is given."""
    torch.manual_seed(0)
    model = VisionTransformer(**{**SIZES, **changes}).double()
    for parameter in model.blocks.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    torch.nn.init.normal_(model.pos_embed)
    return model


def pit():
    return timm.create_model("pit_ti_224", img_size=64)


def pictures(count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 24, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", LAYERS, ids=lambda options: "-".join(options) or "plain")
def test_a_layer_of_softmax_is_timms_own(options):
    torch.manual_seed(0)
    own, ours = (
        kind(32, num_heads=2, **options, dtype=torch.float64) for kind in (Attention, attention_layer("softmax"))
    )
    ours.load_state_dict(own.state_dict())
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x), own(x))
    real = torch.rand(2, 1, 1, 7) > 0.4
    real[..., 2] = True
    added = torch.zeros(2, 1, 1, 7, dtype=torch.float64).masked_fill(~real, -10_000.0)
    for mask in (real, added):
        torch.testing.assert_close(ours(x, attn_mask=mask), own(x, attn_mask=mask))
    assert (own(x, attn_mask=real) - own(x)).abs().max() > 0.01


def test_a_vision_transformer_of_softmax_is_timms_own_with_its_gradients():
    own, ours = transformer(), transformer(attn_layer=attention_layer("softmax"))
    ours.load_state_dict(own.state_dict())
    for model in (own, ours):
        model(pictures()).square().sum().backward()
    torch.testing.assert_close(ours(pictures()), own(pictures()))
    for mine, theirs in zip(ours.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_every_mechanism_sees_the_whole_picture_and_trains(name):
    model = transformer(attn_layer=attention_layer(name, grid=GRID))
    images = pictures()
    output = model(images)
    output.square().sum().backward()
    assert all(part.grad is None or part.grad.isfinite().all() for part in model.parameters())
    assert model.blocks[0].attn.qkv.weight.grad.abs().max() > 0
    changed = images.clone()
    changed[:, :, -8:, -8:] += 1.0  # the last patch; the class is read at the token before the first
    assert (model(changed) - output).abs().amax(-1).min() > 1e-4


def test_a_convolving_mechanism_is_told_the_picture():
    layer = transformer(attn_layer=attention_layer("focused", grid=GRID, class_tokens=1)).blocks[0].attn
    assert (layer.mechanism.convolution.grid, layer.mechanism.convolution.class_tokens) == (GRID, 1)


def test_rotary_positions_tell_places_apart():
    """Without positions the class does not depend on the order of the patches."""
    images = pictures()
    mirrored = torch.cat([images[..., 8:], images[..., :8]], -1)  # the columns of patches in another order
    for rotary in (False, True):
        model = transformer(attn_layer=attention_layer("linear", grid=GRID, rotary=rotary))
        model.pos_embed.data.zero_()
        difference = (model(images) - model(mirrored)).abs().max()
        assert (difference > 1e-4) == rotary


def test_replacing_keeps_the_models_weights():
    model = transformer()
    before, kept = model(pictures()), {name: each.clone() for name, each in model.state_dict().items()}
    assert replace_attention(model, "softmax") is model
    assert all(isinstance(block.attn, MechanismAttention) for block in model.blocks)
    torch.testing.assert_close(model(pictures()), before)
    replace_attention(model, "polarity", layers=[-1])
    assert model.blocks[1].attn.mechanism.convolution.grid == GRID
    assert model.blocks[0].attn.chosen.name == "softmax"
    state = model.state_dict()
    assert all(torch.equal(state[name], each) for name, each in kept.items())
    assert all(".mechanism." in name for name in state.keys() - kept.keys())
    assert (model(pictures()) - before).abs().max() > 1e-3


def test_registers_and_no_class_token_are_counted():
    for changes, count in (({"reg_tokens": 2}, 3), ({"class_token": False, "global_pool": "avg"}, 0)):
        model = replace_attention(transformer(**changes), "focused", rotary=True)
        assert model.blocks[0].attn.mechanism.convolution.class_tokens == count
        assert model(pictures()).isfinite().all()


def test_pictures_of_any_size_are_attended_to_where_no_grid_is_needed():
    model = transformer(dynamic_img_size=True)
    wide = torch.cat([pictures(), pictures()], 3)[..., :40]
    expected = model(wide)
    torch.testing.assert_close(replace_attention(model, "softmax")(wide), expected)


def test_a_mechanisms_weights_begin_as_its_own():
    """timm draws those of all linear layers by a rule of its own, and a learned sketch has such layers."""
    torch.manual_seed(0)
    model = VisionTransformer(**SIZES, attn_layer=attention_layer("polysketch-paper"))
    network = model.blocks[0].attn.mechanism.feature_map.networks[0]
    assert network.input_up.weight.std().item() == pytest.approx(16**-0.5, rel=0.1)
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_model_is_copied_moved_and_saved():
    model = transformer(attn_layer=attention_layer("performer"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(pictures()), model(pictures()))
    other = transformer(attn_layer=attention_layer("performer"))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(pictures()), model(pictures()))
    assert (
        VisionTransformer(**SIZES, attn_layer=attention_layer("linear"), device="meta")
        .blocks[0]
        .attn.qkv.weight.is_meta
    )


def test_under_autocast_normed_queries_go_with_their_values():
    model = transformer(qk_norm=True, attn_layer=attention_layer("linear")).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(pictures().float()).isfinite().all()


def test_a_mask_of_pairs_is_refused():
    layer = attention_layer("linear")(32, num_heads=2)
    x = torch.randn(2, 7, 32)
    for shape in ((7, 7), (2, 1, 7, 7), (2, 1, 1, 6), (3, 1, 1, 7)):
        with pytest.raises(ValueError, match="expected a mask that hides the same keys from every head and query"):
            layer(x, attn_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected a mask of bool, or of 0 and numbers from -9,000 down, found 1.0"):
        layer(x, attn_mask=torch.ones(2, 1, 1, 7))


WRONG = [
    (lambda: attention_layer("nope"), "unknown attention mechanism 'nope'"),
    (lambda: attention_layer("linear", kin="elu"), "has no option 'kin'"),
    (lambda: attention_layer("polysketch"), "'polysketch' is causal only, and a patch sees the whole picture"),
    (lambda: attention_layer("focused"), "'focused', which convolves over the picture, needs grid"),
    (lambda: attention_layer("linear", rotary=True), "rotary=True needs grid=.height, width. in patches, found none"),
    (lambda: attention_layer("linear")(32, num_heads=2, attn_drop=0.1), "expected attn_drop=0"),
    (lambda: replace_attention(transformer(attn_drop_rate=0.1), "linear"), "expected attn_drop=0"),
    (lambda: replace_attention(torch.nn.Linear(2, 2), "linear"), "expected a model of timm .* found Linear"),
    (lambda: replace_attention(pit(), "linear"), "one grid of patches in all layers .* found PoolingVisionTransformer"),
    (lambda: replace_attention(timm.create_model("crossvit_tiny_240"), "linear"), "one grid .* found CrossVit"),
    (
        lambda: replace_attention(transformer(dynamic_img_size=True), "polarity"),
        "pictures of one size where 'polarity'",
    ),
    (
        lambda: replace_attention(transformer(dynamic_img_size=True), "linear", rotary=True),
        "'linear' with rotary=True needs their grid, found dynamic_img_size=True",
    ),
    (lambda: replace_attention(transformer(), "linear", layers=[2]), "expected layers from 0 to 1, found 2"),
    (
        lambda: transformer(attn_layer=attention_layer("linear", grid=(3, 3), rotary=True))(pictures()),
        "expected 1 class tokens and 3 x 3 patches, found 13 tokens",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_does_not_fit_is_told_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as found:
        make()
    assert "\n" not in str(found.value)
