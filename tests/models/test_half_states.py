"""States in half precision: of half the size, nearly the same outputs, and refused where roundings would add up."""

import pytest
import torch

from polysketch import attention
from polysketch.attention import MECHANISMS
from polysketch.generation import (
    Engine,
    Request,
    Sampler,
    Snapshots,
    bytes_of_request,
    generate,
    load_conversation,
    save_conversation,
)
from polysketch.models import ModelConfig, TransformerLM

DTYPES = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
LENGTH = 40


def model_with(name: str = "polysketch", **options) -> TransformerLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    window = {"window": 8, "sketch_size": 4, "far_bias": 2.0}
    chosen = {"attention_options": window, "attention_every": 2} if name == "polysketch" else {}
    return TransformerLM(ModelConfig(**sizes, attention=name, **(chosen | options))).eval()


def read(model: TransformerLM, ids: torch.Tensor, spans: list[int]):
    """Logits, span by span, and the state after them."""
    state, found = model.init_state(len(ids)), []
    for span in ids.split(spans, 1):
        logits, state = model.extend(span, state)
        found.append(logits)
    return torch.cat(found, 1), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [[LENGTH], [17] + [1] * 23, [1] * LENGTH], ids=["whole", "prompt", "tokens"])
def test_states_take_half_and_answer_nearly_the_same(spans, dtype):
    model, ids = model_with(), torch.randint(48, (3, LENGTH))
    expected, wide = read(model, ids, spans)
    model.keep_states_in(dtype)
    found, state = read(model, ids, spans)
    error = (found - expected).norm() / expected.norm()
    assert DTYPES[dtype] / 100 < error < 4 * DTYPES[dtype]
    assert state.nbytes < 0.55 * wide.nbytes
    for other in (state.clone(), state.reorder(torch.tensor([0, 1, 2]))):
        assert other.nbytes == state.nbytes
        assert torch.equal(model.extend(ids[:, :1], other)[0], model.extend(ids[:, :1], state.clone())[0])
    model.keep_states_in(None)
    assert torch.equal(read(model, ids, spans)[0], expected)


def test_a_model_in_half_precision_has_sums_in_it_when_asked():
    model, ids = model_with().bfloat16(), torch.randint(48, (1, LENGTH))
    wide = read(model, ids, [LENGTH])[1]
    model.keep_states_in(torch.bfloat16)
    state = read(model, ids, [LENGTH])[1]
    assert wide.nbytes - state.nbytes == 2 * 2 * 16 * 17  # two heads; the window was in bfloat16 before


def test_texts_are_generated_on_them():
    model = model_with()
    prompts = [torch.randint(48, (length,)).tolist() for length in (3, 20)]
    expected = generate(model, prompts, max_new_tokens=12, temperature=0.0)
    model.keep_states_in(torch.float16)
    assert generate(model, prompts, max_new_tokens=12, temperature=0.0).tokens == expected.tokens


def test_a_server_has_room_for_twice_as_many_and_answers_each_as_if_alone():
    model = model_with()
    wide = bytes_of_request(model)
    model.keep_states_in(torch.float16)
    assert bytes_of_request(model) < 0.55 * wide
    prompts = [torch.randint(48, (length,)).tolist() for length in (3, 20, 9)]
    engine, made = Engine(model, slots=2, chunk=7, snapshots=Snapshots(2**20)), {}
    tickets = [engine.add(Request(prompt, 12, Sampler(temperature=0.0))) for prompt in prompts]
    while not engine.is_idle:
        for event in engine.step():
            made.setdefault(event.ticket, []).extend([] if event.token is None else [event.token])
    alone = [generate(model, [prompt], max_new_tokens=12, temperature=0.0).tokens[0] for prompt in prompts]
    assert [made[ticket] for ticket in tickets] == alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_conversation_is_saved_as_it_is_kept(dtype, tmp_path):
    model, ids = model_with(), torch.randint(48, (1, LENGTH))
    model.keep_states_in(dtype)
    _, state = read(model, ids, [LENGTH])
    save_conversation(tmp_path / "text.safetensors", model, ids[0].tolist(), state)
    tokens, loaded = load_conversation(tmp_path / "text.safetensors", model)
    assert tokens == ids[0].tolist()
    assert loaded.nbytes == state.nbytes
    with torch.inference_mode():
        assert torch.equal(model.extend(ids[:, :1], loaded)[0], model.extend(ids[:, :1], state)[0])
    model.keep_states_in(None)
    with pytest.raises(ValueError, match=r"kept in another dtype \(keep_states_in\)"):
        load_conversation(tmp_path / "text.safetensors", model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_refuses_them_or_decodes_as_it_attends(name, dtype):
    options = MECHANISMS[name].examples[0]
    hidden_size = {"hidden_size": 12} if "hidden_size" in MECHANISMS[name].__init__.__annotations__ else {}
    mechanism = attention.build(name, num_heads=2, head_dim=8, **options, **hidden_size).eval()
    reason = mechanism.why_not_sums_in(dtype)
    if reason is not None:
        with pytest.raises(ValueError, match=r"float32|bfloat16"):
            mechanism.keep_sums_in(dtype)
        assert mechanism.sums_dtype is None
        return
    if not mechanism.is_causal:
        return
    mechanism.keep_sums_in(dtype)
    query, key, value = (torch.randn(2, 2, 37, 8) for _ in range(3))
    hidden = torch.randn(2, 37, 12)
    with torch.no_grad():
        expected = mechanism(query, key, value, hidden=hidden)
        state, found = mechanism.init_state(2), []
        for i in range(37):
            one = [x[:, :, i : i + 1] for x in (query, key, value)]
            out, state = mechanism.extend(*one, state, hidden=hidden[:, i : i + 1])
            found.append(out)
    error = (torch.cat(found, 2) - expected).norm() / expected.norm()
    assert error < 8 * DTYPES[dtype]


def test_which_mechanisms_keep_sums_in_half_precision():
    """So that a new one is asked: what adds token by token must refuse."""
    built = {
        name: attention.build(name, num_heads=2, head_dim=8, **MECHANISMS[name].examples[0]) for name in MECHANISMS
    }
    able = {name for name, one in built.items() if one.why_not_sums_in(torch.bfloat16) is None and has_sums(one)}
    assert able == {"polysketch", "polysketch-paper"}


def has_sums(mechanism) -> bool:
    return mechanism.is_causal and "sums" in str(type(mechanism).init_state.__doc__).lower()


def test_what_cannot_be_is_told_and_changes_nothing():
    model = model_with("linear")
    with pytest.raises(ValueError, match=r"layer 0: LinearAttention adds token by token .* stay in float32"):
        model.keep_states_in(torch.float16)
    with pytest.raises(TypeError, match=r"torch\.bfloat16 or torch\.float16, got torch\.int8"):
        model_with().keep_states_in(torch.int8)
    paper = model_with("polysketch-paper", attention_options={"local_chunk": 8, "sketch_size": 4})
    with pytest.raises(ValueError, match="beyond the range of float16: its sums can be in bfloat16"):
        paper.keep_states_in(torch.float16)
    assert model.state_dtype is None
    assert paper.state_dtype is None
