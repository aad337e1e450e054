"""`polysketch generate --chat`: what the model reads is what the tokenizer's template writes, turn by turn."""

import io
import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from attention.covering import first_always
from integrations.huggingface.runs import make_run_in
from polysketch.cli import main
from polysketch.integrations.chat import load_chat

TEMPLATE = "{% for each in messages %}<|turn|>{{ each.role }}:{{ each.content }}<|done|>{% endfor %}<|turn|>assistant:"
CHANGING = TEMPLATE.replace("each.content", "each.content | upper")
QUESTIONS = ["Who barks <|done|>?", "And then?", "Why?"]
LENGTH = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run, exported; and a model of transformers whose tokenizer has a template and tokens of turns."""
    folder = tmp_path_factory.mktemp("chat")
    run, _ = make_run_in(folder, "bytes")
    assert main(["export", str(run), str(folder / "exported")]) == 0
    _chat_model(folder / "llama")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def _chat_model(folder, template=TEMPLATE):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|turn|>", "<|done|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.5, **sizes)
    model = LlamaForCausalLM(config).eval()
    unsaid = [index for letter, index in letters.items() if not (letter.isascii() and letter.isprintable())]
    with torch.no_grad():
        model.lm_head.weight[unsaid] = 0.0  # so that it says whole characters
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|done|>")]
    model.save_pretrained(folder)


def answered(folder, *arguments, capsys) -> dict:
    capsys.readouterr()
    settings = ["--max-new-tokens", str(LENGTH), "--temperature", "0", "--json"]
    assert main(["generate", str(folder), *arguments, *settings]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def reference(folder, messages) -> list[int]:
    """The answer that transformers gives."""
    from polysketch.integrations.transformers_folder import load_transformers

    model, tokenizer = load_transformers(folder)
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    made = model.generate(**asked, max_new_tokens=LENGTH, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    return made[:-1] if made[-1] in ends else made


@pytest.mark.parametrize("question", first_always(QUESTIONS))
def test_a_question_is_answered_as_transformers_answers_it(folders, question, capsys):
    found = answered(folders / "llama", "--chat", "--prompt", question, capsys=capsys)
    assert found["tokens"] == [reference(folders / "llama", [{"role": "user", "content": question}])]


def test_an_answer_ends_where_the_settings_for_generation_say(folders, monkeypatch, tmp_path, capsys):
    """Whatever token it is: here the third that is said without them."""
    found = answered(folders / "llama", "--chat", "--prompt", QUESTIONS[0], capsys=capsys)["tokens"][0]
    place = next(index for index in range(1, LENGTH) if found[index] not in found[:index])
    for file in (folders / "llama").iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = tmp_path / "generation_config.json"
    described = json.loads(settings.read_text())
    settings.unlink()
    settings.write_text(json.dumps({**described, "eos_token_id": [256, found[place]]}))
    ended = answered(tmp_path, "--chat", "--prompt", QUESTIONS[0], capsys=capsys)
    assert ended["tokens"] == [found[:place]]
    assert ended["stopped"] == [True]


def test_the_answer_alone_is_printed(folders, capsys):
    expected = answered(folders / "llama", "--chat", "--prompt", "Why?", capsys=capsys)["texts"][0]
    settings = ["--max-new-tokens", str(LENGTH), "--temperature", "0"]
    assert main(["generate", str(folders / "llama"), "--chat", "--prompt", "Why?", *settings]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("name", ["run", "exported"])
def test_a_template_of_a_file_makes_a_chat_of_a_run(folders, name, capsys):
    """And what users write stays text, also where it spells a token."""
    given = answered(
        folders / name, "--chat-template", str(folders / "chat.jinja"), "--prompt", QUESTIONS[0], capsys=capsys
    )
    text = f"<|turn|>user:{QUESTIONS[0]}<|done|><|turn|>assistant:"
    assert given["tokens"] == answered(folders / name, "--prompt", text, capsys=capsys)["tokens"]


def converse(folder, lines, monkeypatch, capsys, *arguments) -> tuple[str, list[int]]:
    """What is said in a chat, and the tokens that were read at each turn."""
    from polysketch import generation

    reading, generate = [], generation.generate

    def counted(model, prompts, **settings):
        reading.append(len(prompts[0]))
        return generate(model, prompts, **settings)

    monkeypatch.setattr("polysketch.generation.generate", counted)
    monkeypatch.setattr("polysketch.cli.interactive.generate", counted)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    capsys.readouterr()
    settings = ["--max-new-tokens", str(LENGTH), "--temperature", "0"]
    assert main(["generate", str(folder), "--interactive", "--chat", *settings, *arguments]) == 0
    return capsys.readouterr().out, reading


@pytest.mark.parametrize("template", [TEMPLATE, CHANGING], ids=["as said", "changed"])
def test_every_turn_is_answered_as_transformers_answers_the_whole_chat(
    folders, tmp_path, template, monkeypatch, capsys
):
    """A template that writes replies as they were said is read on; one that changes them is read again."""
    folder = tmp_path / "llama"
    _chat_model(folder, template)
    from polysketch.integrations.transformers_folder import read_tokenizer

    tokenizer = read_tokenizer(folder)
    messages, expected, prompts, fed = [], "", [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompts.append(len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]))
        made = reference(folder, messages)
        fed.append(min(len(made), LENGTH - 1))  # the last token that may be made is not read
        messages.append({"role": "assistant", "content": tokenizer.decode(made)})
        expected += messages[-1]["content"] + "\n"
    lines = [f"{question}\n" for question in QUESTIONS[1:]]
    shown, reading = converse(folder, lines, monkeypatch, capsys, "--prompt", QUESTIONS[0])
    assert shown == expected
    unread = [after - before - kept for before, after, kept in zip([0, *prompts], prompts, [0, *fed], strict=False)]
    assert reading == (unread if template == TEMPLATE else prompts)


def test_prompts_of_a_file_are_messages_and_another_template_is_refused(folders, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS[:2]))
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--temperature", "0"]
    command = ["generate", str(folders / "llama"), *files, "--max-new-tokens", str(LENGTH)]
    assert main([*command, "--chat"]) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for question, text in zip(QUESTIONS, texts, strict=False):
        assert answered(folders / "llama", "--chat", "--prompt", question, capsys=capsys)["texts"] == [text]
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace("turn", "done"))
    assert main([*command, "--chat", "--chat-template", str(tmp_path / "other.jinja")]) == 1
    assert "another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exported", "--chat", "--prompt", "x"], "has no chat template, so that nobody knows"),
        (["run", "--chat", "--prompt", "x"], "has no chat template, so that nobody knows"),
        (["llama", "--chat"], "expected a --prompt, --prompts or --interactive with --chat"),
        (["llama", "--chat-template", "absent.jinja", "--prompt", "x"], "expected a file, found none at absent.jinja"),
        (["llama", "--chat-template", "refusing.jinja", "--prompt", "x"], "refuses these messages: users only"),
        (["llama", "--chat-template", "broken.jinja", "--prompt", "x"], "the chat template refuses these messages"),
    ],
)
def test_what_makes_no_chat_is_told_in_one_line(folders, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folders)
    (folders / "refusing.jinja").write_text("{{ raise_exception('users only') }}")
    (folders / "broken.jinja").write_text("{% for each in %}")
    assert main(["generate", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "expected JSON in "),
        ("[" * 10**5, "expected JSON in "),
        ("\udcff".encode("utf-8", "surrogateescape"), "expected JSON in "),
        ("[5]", "must be an object whose eos_token_id"),
        ('{"eos_token_id": "</s>"}', "must be an object whose eos_token_id"),
        ('{"eos_token_id": [1, true]}', "must be an object whose eos_token_id"),
        ('{"eos_token_id": -1}', "must be an object whose eos_token_id"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_malformed_settings_for_generation_are_told_in_one_line(folders, settings, message, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(folders / "llama", folder)
    (folder / "generation_config.json").write_bytes(settings if isinstance(settings, bytes) else settings.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_chat(folder, None)
    assert "\n" not in str(caught.value)
