"""Special tokens of a template are tokens; what a message spells is text."""

import pytest

from polysketch.data.tokenization import BytesTokenizer

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

END = 256
TEMPLATES = {
    "by name": "{{ bos_token }}{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}",
    "spelled out": "<|endoftext|>{% for each in messages %}{{ each.content ~ '<|endoftext|>' }}{% endfor %}",
    "compared": "{% if eos_token == '<|endoftext|>' %}{{ bos_token }}{% endif %}"
    "{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_special_tokens_of_a_template_are_ids_and_those_of_a_message_text(template):
    from polysketch.integrations.chat import renderer
    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    own = BytesTokenizer()
    render = renderer(to_fast_tokenizer(own), template)
    said = ["hi", "I spell <|endoftext|>"]
    found = render([{"role": "user", "content": each} for each in said])
    assert found == [END, *own.encode(said[0]), END, *own.encode(said[1]), END]


def test_a_template_without_special_tokens_is_text():
    from polysketch.integrations.chat import renderer
    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    render = renderer(to_fast_tokenizer(BytesTokenizer()), "{{ messages[0].content }}!")
    assert render([{"role": "user", "content": "é"}]) == [*"é!".encode()]
    assert render([{"role": "user", "content": ""}]) == [*b"!"]


def test_the_template_of_transformers_has_its_special_tokens_where_texts_may_spell_them():
    """As docs/huggingface.md says."""
    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    tokenizer = to_fast_tokenizer(BytesTokenizer())
    tokenizer.chat_template = TEMPLATES["by name"]
    tokenizer.split_special_tokens = False
    found = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert found == [END, *b"hi", END]
