"""What is served: runs, exported folders, and how a chat becomes a prompt."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from integrations.huggingface.runs import make_run_in
from polysketch.data.tokenization import TokenIds
from polysketch.serving.errors import ApiError
from polysketch.serving.served_model import load_served

TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
CHAT = [{"role": "user", "content": "Hi <|endoftext|>"}]
AS_TEXT = "user: Hi <|endoftext|>\nassistant:"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps."""
    return make_run_in(tmp_path_factory.mktemp("run"), "bytes")[0]


@pytest.fixture(scope="module")
def exported(run):
    """The same, exported."""
    from polysketch.integrations.huggingface import export_run

    return export_run(run, run.parent / "exported")


@pytest.fixture(scope="module")
def template(run):
    (run.parent / "chat.jinja").write_text(TEMPLATE)
    return run.parent / "chat.jinja"


def test_an_exported_folder_is_served_as_its_run_is(run, exported):
    ours, theirs = load_served(run), load_served(exported)
    assert (ours.name, theirs.name) == (run.name, "exported")
    assert ours.tokenizer.sha256 == theirs.tokenizer.sha256
    ids = torch.tensor([ours.prompt("some text")])
    assert torch.equal(ours.model(ids), theirs.model(ids))
    assert not theirs.model.training
    assert ours.render is None
    assert theirs.render is None


def test_ends_are_what_tokenizer_and_settings_for_generation_declare(run, exported, tmp_path):
    """As vLLM and transformers have them, so that all engines end where the others do."""
    folder = tmp_path / "chats"
    shutil.copytree(exported, folder)
    end = load_served(run).tokenizer.end_of_text
    assert load_served(run).ends == load_served(exported).ends == {end}
    (folder / "SHA256SUMS").unlink()  # what follows is on purpose
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_served(folder).ends == {end, 7, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="must be an object whose eos_token_id"):
        load_served(folder)


def test_an_empty_text_follows_the_end_of_another(run):
    served = load_served(run, name="other")
    assert served.name == "other"
    assert served.prompt("") == [served.tokenizer.end_of_text]
    assert served.prompt([3, 4]) == [3, 4]


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_a_chat_template_makes_a_prompt_of_a_chat(kind, template, request):
    """What users write is text, also where it spells the end of a text."""
    served = load_served(request.getfixturevalue(kind), chat_template=template)
    assert served.prompt(CHAT) == served.tokenizer.encode(AS_TEXT)


def test_the_exported_tokenizers_own_template_is_used(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "templated")
    (folder / "SHA256SUMS").unlink()  # what follows is on purpose
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    served = load_served(folder)
    assert served.prompt(CHAT) == served.tokenizer.encode(AS_TEXT)


def test_a_chat_that_the_template_refuses_is_told_so(run, template):
    template.write_text("{{ raise_exception('no system messages') }}")
    try:
        served = load_served(run, chat_template=template)
    finally:
        template.write_text(TEMPLATE)
    with pytest.raises(ApiError, match="the chat template refuses these messages: no system messages"):
        served.prompt(CHAT)


def test_a_chat_that_utf8_cannot_hold_is_told_so(run, template):
    served = load_served(run, chat_template=template)
    with pytest.raises(ApiError, match="expected text that UTF-8 can hold"):
        served.prompt([{"role": "user", "content": "x\ud800"}])


def test_a_chat_without_a_template_is_refused(run):
    with pytest.raises(ApiError, match="no chat template"):
        load_served(run).prompt(CHAT)


def test_ids_beyond_the_tokenizers_stand_for_nothing(run):
    """A vocabulary may have been made larger than the tokenizer's, and any of it may be drawn."""
    assert load_served(run).tokenizer.known_bytes([ord("a"), 256, 300, ord("b")]) == b"ab"


def test_a_model_of_ids_alone_is_refused(run, monkeypatch):
    monkeypatch.setattr("polysketch.training.loading.load_tokenizer", lambda path: TokenIds(257))
    with pytest.raises(ValueError, match="expected a model of text, found one of token ids"):
        load_served(run)


def test_a_key_value_cache_has_a_key_and_a_value_in_every_layer(run):
    served = load_served(run)
    config = served.model.config
    assert served.key_value_bytes == 2 * 4 * config.num_layers * config.hidden_size
    half = replace(served, model=load_served(run).model.half())
    assert half.key_value_bytes == served.key_value_bytes // 2


def test_a_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"expected a model of type polysketch.*found 'llama'"):
        load_served(tmp_path)
