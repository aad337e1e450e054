"""Pictures in patches: which pixels a patch has, where it stands, and what the model sees."""

import pytest
import torch

from polysketch.attention import MECHANISMS
from polysketch.models import PatchClassifier, PatchEncoder, PatchEncoderConfig
from polysketch.models.patch_encoder import patches_of

SIZES = {"vocab_size": 256, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
IMAGE = {"image_size": (6, 4, 3), "patch_size": 2}


def config(**changes) -> PatchEncoderConfig:
    return PatchEncoderConfig(**{**SIZES, **IMAGE, "attention": "softmax", **changes})


def pixels(count: int = 2) -> torch.Tensor:
    return torch.randint(256, (count, 72), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def classifier(**changes) -> PatchClassifier:
    torch.manual_seed(0)
    return PatchClassifier(config(**changes), 5)


def test_a_patch_is_a_square_of_the_picture():
    picture = pixels(1)
    patches = patches_of(picture, config())
    square = picture.view(6, 4, 3)[2:4, 2:4]  # of the second row and the second column of patches
    assert torch.equal(patches[0, 3], square.flatten())
    assert patches.flatten().sort().values.equal(picture.flatten().sort().values)


def test_the_embedding_is_a_convolution_with_a_stride():
    """As vision transformers are written elsewhere."""
    torch.manual_seed(0)
    encoder = PatchEncoder(config(input_positions=False))
    weight = encoder.embedding.weight.view(16, 2, 2, 3).permute(0, 3, 1, 2)
    picture = pixels().view(2, 6, 4, 3).permute(0, 3, 1, 2) / 127.5 - 1
    expected = torch.nn.functional.conv2d(picture, weight, encoder.embedding.bias, stride=2).flatten(2).mT
    seen = []
    encoder.blocks[0].register_forward_pre_hook(lambda block, given: seen.append(given[0]))
    encoder(pixels())
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [{"rotary": False}, {"input_positions": False}], ids=["sinusoidal", "rotary"])
def test_places_are_told_apart_by_either_kind_of_position(places):
    """Without positions, patches in another order give the same class."""
    picture = pixels(1)
    turned = picture.view(3, 24).flip(0).reshape(1, 72)  # rows of patches in another order
    blind = classifier(rotary=False, input_positions=False)
    torch.testing.assert_close(blind(turned), blind(picture), rtol=1e-4, atol=1e-5)
    model = classifier(**{"rotary": True, "input_positions": True, **places})
    assert (model(turned) - model(picture)).abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.is_bidirectional])
def test_every_mechanism_that_sees_both_sides_learns(name):
    model = classifier(attention=name)
    model.loss(pixels(), torch.tensor([1, 4])).backward()
    assert model.encoder.embedding.weight.grad.abs().max() > 0
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    assert PatchEncoderConfig.from_dict(config(attention=name).to_dict()) == config(attention=name)


def test_a_convolving_mechanism_has_the_grid_unless_told_otherwise():
    model = classifier(attention=("focused", "softmax"))
    assert model.encoder.blocks[0].mechanism.convolution.grid == (3, 2)
    plain = classifier(attention="focused", attention_options={"grid": None})
    assert plain.encoder.blocks[0].mechanism.convolution.grid is None


WRONG = [
    ({"patch_size": 4}, "expected patches that divide 6 x 4 pixels, found 4"),
    ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
    ({"image_size": (6, 0, 3)}, "width must be at least 1, got 0"),
    ({"hidden_size": 18, "head_dim": 8}, "hidden_size must be a multiple of 4, for rows and columns, got 18"),
    ({"head_dim": 6}, "head_dim must be a multiple of 4"),
    ({"learned_positions": 6}, "pictures have sinusoidal and rotary positions, got learned_positions=6"),
    ({"attention": "polysketch"}, "causal only"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_pixels_of_another_picture_are_refused():
    model = classifier()
    for wrong in (pixels()[:, 1:], pixels().long(), pixels()[0]):
        with pytest.raises(ValueError, match=r"pixels must be uint8 of shape \(batch, 6 \* 4 \* 3\)"):
            model(wrong)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 5\), got 1 to 5"):
        model.loss(pixels(), torch.tensor([1, 5]))
    with pytest.raises(ValueError, match="expected at least one row, whose class a loss is of, found none"):
        model.loss(pixels()[:0], torch.zeros(0, dtype=torch.int64))
    assert model.double().loss(pixels(), torch.tensor([1, 4])).dtype == torch.float64
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        PatchClassifier(config(), 1)
