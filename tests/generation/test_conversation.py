"""A conversation's state as a file: it goes on from there, and only with the model that read it."""

import pytest
import safetensors
import safetensors.torch
import torch

from polysketch.generation import Engine, Request, Sampler, Snapshots, generate, load_conversation, save_conversation
from polysketch.models import ModelConfig, TransformerLM
from polysketch.models.fingerprint import model_sha256, tensors_sha256

PROMPT = [int(each) for each in torch.randint(40, (30,), generator=torch.Generator().manual_seed(0))]


def model_of(seed: int, attention: tuple[str, str] = ("polysketch", "linear"), **changes) -> TransformerLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "num_layers": 2, "hidden_size": 64, "num_heads": 2, "projection_convolution": 3}
    model = TransformerLM(ModelConfig(**sizes, attention=attention, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return model_of(1)


def read(model: TransformerLM, tokens: list[int]):
    with torch.inference_mode():
        return model.extend(torch.tensor([tokens]), model.init_state(1))[1]


@pytest.mark.parametrize(
    "attention", [("polysketch", "linear"), ("softmax", "polysketch"), ("polysketch-heavy", "sliding-window")]
)
def test_a_conversation_goes_on_where_it_was_written(attention, tmp_path):
    model = model_of(1, attention)
    save_conversation(tmp_path / "talk.safetensors", model, PROMPT[:20], read(model, PROMPT[:20]))
    tokens, state = load_conversation(tmp_path / "talk.safetensors", model)
    assert tokens == PROMPT[:20]
    with torch.no_grad():
        model.extend(torch.tensor([[5]]), load_conversation(tmp_path / "talk.safetensors", model)[1])  # in any mode
    snapshots = Snapshots(1 << 24)
    snapshots.keep(tokens, state)
    engine = Engine(model, slots=1, snapshots=snapshots)
    engine.add(Request(PROMPT, 12, Sampler(temperature=0)))
    events = []
    while not engine.is_idle:
        events += engine.step()
    assert [event.token for event in events] == generate(model, [PROMPT], max_new_tokens=12, temperature=0).tokens[0]
    assert {event.reused for event in events} == {20}


def test_keys_and_values_of_fewer_tokens_are_refused(tmp_path):
    """A file altered by hand."""
    path = tmp_path / "talk.safetensors"
    model = model_of(1, ("softmax", "polysketch"))
    save_conversation(path, model, PROMPT, read(model, PROMPT))
    tensors = safetensors.torch.load_file(path)
    (name,) = [name for name in tensors if name.startswith("layers/0") and name.endswith("value")]
    tensors[name] = tensors[name][:, :, :-1].contiguous()
    sums = {"model_sha256": model_sha256(model), "tensors_sha256": tensors_sha256(tensors)}
    safetensors.torch.save_file(tensors, path, metadata=sums)
    with pytest.raises(ValueError, match="expected the tensors of a state of this model"):
        load_conversation(path, model)


def test_another_models_state_is_refused(model, tmp_path):
    """Other weights, or the same weights and another option."""
    path = tmp_path / "talk.safetensors"
    save_conversation(path, model, PROMPT, read(model, PROMPT))
    with torch.no_grad():
        other = model_of(1)
        other.output_bias[3] += 1e-6
    for wrong in (other, model_of(2), model_of(1, norm_epsilon=1e-4)):
        with pytest.raises(ValueError, match="expected a conversation of this model"):
            load_conversation(path, wrong)
    assert load_conversation(path, model_of(1))[0] == PROMPT


def test_a_file_of_something_else_is_refused(model, tmp_path):
    (tmp_path / "text").write_text("no state")
    with pytest.raises(ValueError, match="found something else"):
        load_conversation(tmp_path / "text", model)
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        load_conversation(tmp_path / "absent", model)


def test_tokens_that_the_state_has_not_read_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"after 29 tokens, found \[30\]"):
        save_conversation(tmp_path / "talk", model, PROMPT[1:], read(model, PROMPT))
    assert list(tmp_path.iterdir()) == []


def test_positions_that_nobody_counted_to_are_refused(model, tmp_path):
    """With a right digest: an index before the first place of a window would be written to."""
    path = tmp_path / "talk.safetensors"
    save_conversation(path, model, PROMPT, read(model, PROMPT))
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    name = next(name for name in tensors if name.endswith("recent/position"))
    tensors[name] -= 1000
    metadata["tensors_sha256"] = tensors_sha256(tensors)
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"expected 30 tokens read in layers/0/.*, found \[-970\]"):
        load_conversation(path, model)


def test_one_changed_byte_is_found(model, tmp_path):
    path = tmp_path / "talk.safetensors"
    save_conversation(path, model, PROMPT, read(model, PROMPT))
    content = path.read_bytes()
    for place in range(len(content) // 2, len(content), len(content) // 20):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="the file is damaged"):
            load_conversation(path, model)
