"""The drop-in for torch's module: with softmax it is torch's, with others it takes what torch's takes."""

import pytest
import torch
from torch import nn

from polysketch.attention import MECHANISMS
from polysketch.nn import MultiheadAttention

LENGTH, SOURCE, BATCH, WIDTH, HEADS = 23, 17, 3, 32, 4


def inputs(*, same: bool = True, batch_first: bool = True, widths: tuple[int, int] = (WIDTH, WIDTH)):
    torch.manual_seed(0)
    source = LENGTH if same else SOURCE
    made = [torch.randn(BATCH, n, w) for n, w in ((LENGTH, WIDTH), (source, widths[0]), (source, widths[1]))]
    return made if batch_first else [x.transpose(0, 1) for x in made]


def pair(attention: str = "softmax", **options) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for parameter in theirs.parameters():  # biases too
        nn.init.normal_(parameter, std=0.3)
    return theirs, MultiheadAttention.from_torch(theirs, attention=attention)


def causal_mask(floating: bool = False) -> torch.Tensor:
    above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.zeros(LENGTH, LENGTH).masked_fill(above, -torch.inf) if floating else above


def padding(length: int) -> torch.Tensor:
    return torch.arange(length) >= torch.tensor([[length], [length - 6], [5]])


PADDED = padding(LENGTH)
CALLS = {
    "plain": {},
    "causal": {"attn_mask": causal_mask(), "is_causal": True},
    "causal by its mask": {"attn_mask": causal_mask()},
    "causal by a floating mask": {"attn_mask": causal_mask(floating=True)},
    "causal by a mask for each head": {"attn_mask": causal_mask().expand(BATCH * HEADS, -1, -1)},
    "padded": {"key_padding_mask": PADDED},
    "padded by a floating mask": {"key_padding_mask": torch.zeros(BATCH, LENGTH).masked_fill(PADDED, -torch.inf)},
    "causal and padded": {"key_padding_mask": PADDED, "attn_mask": causal_mask(), "is_causal": True},
    "keys hidden by attn_mask": {"attn_mask": (torch.arange(LENGTH) > 8).expand(LENGTH, -1)},
    "keys hidden by attn_mask for each head": {
        "attn_mask": PADDED.repeat_interleave(HEADS, 0)[:, None].expand(-1, LENGTH, -1)
    },
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", [{"batch_first": True}, {}, {"bias": False, "batch_first": True}])
def test_with_softmax_it_is_torchs(call, options):
    theirs, ours = pair(**options)
    given = inputs(batch_first=options.get("batch_first", False))
    expected, _ = theirs(*given, need_weights=False, **CALLS[call])
    found, weights = ours(*given, **CALLS[call])
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_with_softmax_it_is_torchs_with_gradients_across_widths_and_unbatched():
    theirs, ours = (module.double() for module in pair(batch_first=True, kdim=20, vdim=12))
    given = [x.double() for x in inputs(same=False, widths=(20, 12))]
    mask = {"key_padding_mask": padding(SOURCE)}
    expected, found = theirs(*given, **mask)[0], ours(*given, **mask)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for module, output in ((theirs, expected), (ours, found)):
        output.square().sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name].grad, parameter.grad)
    alone = [x[1] for x in given]
    torch.testing.assert_close(ours(*alone)[0], theirs(*alone)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_attends_as_it_can(name):
    kind = MECHANISMS[name]
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=name)
    x = inputs()[0]
    later = x.clone()
    later[:, 12:] = torch.randn_like(later[:, 12:])
    if kind.is_causal:
        before, after = (ours(one, one, one, is_causal=True)[0] for one in (x, later))
        torch.testing.assert_close(before[:, :12], after[:, :12])
        assert not torch.allclose(before[:, 12:], after[:, 12:])
    else:
        with pytest.raises(ValueError, match="cannot be causal: choose attention of softmax, "):
            ours(x, x, x, is_causal=True)
    if kind.is_bidirectional:
        before, after = (ours(one, one, one, key_padding_mask=PADDED)[0] for one in (x, x + 1.0 * PADDED[..., None]))
        torch.testing.assert_close(before[~PADDED], after[~PADDED])
    else:
        with pytest.raises(ValueError, match=r"cannot be bidirectional:.* choose attention of softmax, "):
            ours(x, x, x)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_causal_mask_of_one_token_is_for_every_mechanism(name):
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=name)
    x = inputs()[0][:, :1]
    found = ours(x, x, x, attn_mask=causal_mask()[:1, :1])[0]
    torch.testing.assert_close(found, ours(x, x, x, is_causal=MECHANISMS[name].is_causal)[0])


def test_keys_of_another_length_are_for_mechanisms_that_cross():
    query, key, value = inputs(same=False)
    assert (
        MultiheadAttention(WIDTH, HEADS, batch_first=True, attention="linear")(query, key, value)[0].shape
        == query.shape
    )
    with pytest.raises(
        ValueError, match="LocalAttention cannot be of keys of another length: choose attention of softmax"
    ):
        MultiheadAttention(WIDTH, HEADS, batch_first=True, attention="local")(query, key, value)
    with pytest.raises(ValueError, match="expected queries and keys of one length for is_causal, found 23 and 17"):
        MultiheadAttention(WIDTH, HEADS, batch_first=True, attention="linear")(query, key, value, is_causal=True)


@pytest.mark.parametrize("attention", ["linear", "polysketch-paper"])
def test_torchs_layers_use_it_and_not_their_own_softmax(attention):
    """In evaluation torch's encoder layers read the weights of their attention and compute softmax by themselves."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = inputs()[0]
    theirs = encoder(x, src_key_padding_mask=PADDED)
    for one in encoder.layers:
        one.self_attn = MultiheadAttention.from_torch(one.self_attn, attention=attention)
    trained = encoder(x, src_key_padding_mask=PADDED)
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(trained[~PADDED], evaluated[~PADDED])
    assert not torch.allclose(theirs[~PADDED], trained[~PADDED], atol=1e-3)


def test_in_a_decoder_layer_of_torch_with_softmax_nothing_changes():
    torch.manual_seed(3)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 40, dropout=0.0, batch_first=True)
    target, memory, _ = inputs(same=False)
    mask = {"tgt_mask": causal_mask(), "tgt_is_causal": True, "memory_key_padding_mask": padding(SOURCE)}
    expected = layer(target, memory, **mask)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, attention="softmax")
    layer.multihead_attn = MultiheadAttention.from_torch(layer.multihead_attn, attention="softmax")
    torch.testing.assert_close(layer(target, memory, **mask), expected, rtol=1e-4, atol=1e-5)


def test_a_state_dict_of_torch_fits_and_is_given_back():
    theirs, ours = pair("polysketch-paper")
    assert set(theirs.state_dict()) <= set(ours.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


BANNED = causal_mask()
BANNED[3, 1] = True


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attn_mask": BANNED}, "expected attn_mask to be causal, or to hide keys from all queries"),
        ({"attn_mask": torch.randn(LENGTH, LENGTH)}, "expected attn_mask of bool, or 0 and -inf, found other numbers"),
        ({"key_padding_mask": torch.rand(BATCH, LENGTH)}, "expected key_padding_mask of bool, or 0 and -inf"),
        (
            {"attn_mask": (torch.rand(BATCH * HEADS, 1, LENGTH) < 0.5).expand(-1, LENGTH, -1)},
            "to be the same for all heads",
        ),
        (
            {"attn_mask": causal_mask()[:5, :5]},
            r"expected attn_mask of \(length, source length\), \(23, 23\), or .*, found one of the shape \(5, 5\)",
        ),
        ({"attn_mask": causal_mask()[:5, :5], "is_causal": True}, r"found one of the shape \(5, 5\)"),
        ({"attn_mask": causal_mask().expand(BATCH, -1, -1)}, rf"sequences, \({BATCH * HEADS}, 23, 23\), found"),
        ({"key_padding_mask": PADDED.T}, r"source length\), \(3, 23\), found one of the shape \(23, 3\)"),
        ({"key_padding_mask": PADDED[:, :5]}, r"expected key_padding_mask of .* found one of the shape \(3, 5\)"),
        ({"key_padding_mask": PADDED[:1]}, r"expected key_padding_mask of .* found one of the shape \(1, 23\)"),
    ],
)
def test_masks_that_no_sketch_can_have_are_refused(call, message):
    x = inputs()[0]
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(WIDTH, HEADS, batch_first=True)(x, x, x, **call)


def test_what_it_has_not_is_refused():
    with pytest.raises(ValueError, match=r"expected dropout 0, found 0\.1"):
        MultiheadAttention(WIDTH, HEADS, 0.1)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 32 and 5"):
        MultiheadAttention(WIDTH, 5)
    with pytest.raises(ValueError, match="without add_bias_kv"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True))
    with pytest.warns(UserWarning, match=r"attention dropout of 0\.2 is left out"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2))
