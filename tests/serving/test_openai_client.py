"""What OpenAI's own client gets from a server on this machine."""

from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai", reason="the client openai is not installed")

PROMPTS = ["Once upon a time", "def forward(", "x", "The quick brown fox jumps over the lazy dog. " * 4]


def client_of(running, key="none"):
    """That tries once."""
    return openai.OpenAI(base_url=f"{running.address}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(autouse=True)
def _pace(server):
    yield
    server.engine.pace = 0.0
    assert server.idle()


def test_a_completion_is_what_generate_says(client, server):
    found = client.completions.create(model="small", prompt=PROMPTS[0], max_tokens=20, temperature=0)
    assert found.choices[0].text == server.greedy(PROMPTS[0], 20)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (16, 20, 36)
    assert found.model == "small"


def test_a_chat_is_the_continuation_of_its_template(client, server):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    found = client.chat.completions.create(model="small", messages=messages, max_completion_tokens=12, temperature=0)
    assert found.choices[0].message.content == server.greedy("system: Be brief.\nuser: Hi\nassistant: ", 12)
    assert found.choices[0].message.role == "assistant"


def test_the_pieces_of_a_stream_are_the_whole(client, server):
    options = {"include_usage": True}
    stream = client.completions.create(
        model="small", prompt=PROMPTS[0], max_tokens=20, temperature=0, stream=True, stream_options=options
    )
    pieces = list(stream)
    texts = [piece.choices[0].text for piece in pieces if piece.choices]
    assert "".join(texts) == server.greedy(PROMPTS[0], 20)
    assert len(texts) == 20
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices] == [None] * 19 + ["length"]
    assert pieces[-1].usage.completion_tokens == 20
    assert len({piece.id for piece in pieces}) == 1


def test_the_pieces_of_a_chat_begin_with_who_speaks(client, server):
    messages = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(model="small", messages=messages, max_tokens=9, temperature=0, stream=True)
    deltas = [piece.choices[0].delta for piece in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == server.greedy("user: Hi\nassistant: ", 9)


def test_many_clients_at_once_each_get_their_own(client, server):
    """More of them than slots."""

    def ask(prompt: str) -> str:
        return client.completions.create(model="small", prompt=prompt, max_tokens=15, temperature=0).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, PROMPTS * 2)) == [server.greedy(prompt, 15) for prompt in PROMPTS] * 2


def test_several_prompts_and_samples_in_one_request(client, server):
    """Choices stand in the order of the prompts, samples of one side by side; ids are a prompt too."""
    asked = {"model": "small", "prompt": [PROMPTS[0], PROMPTS[1]], "max_tokens": 10, "n": 2, "seed": 7}
    found = client.completions.create(**asked)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4
    again = client.completions.create(**asked)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]
    by_ids = client.completions.create(**{**asked, "prompt": list(PROMPTS[0].encode())})
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in found.choices[:2]]
    assert client.completions.create(**{**asked, "seed": 8}).choices[0].text != found.choices[0].text


def test_equal_prompts_of_a_request_get_different_samples(client):
    """As those that `n` asks for."""
    asked = {"model": "small", "max_tokens": 10, "seed": 7}
    equal = client.completions.create(**asked, prompt=[PROMPTS[0]] * 3)
    samples = client.completions.create(**asked, prompt=PROMPTS[0], n=3)
    assert [choice.text for choice in equal.choices] == [choice.text for choice in samples.choices]
    assert len({choice.text for choice in equal.choices}) == 3


def test_what_was_read_before_is_counted_of_every_prompt(client):
    texts = [f"A text number {number} that is read once. " * 5 for number in range(2)]
    for text in texts:
        client.completions.create(model="small", prompt=text, max_tokens=2)
    again = client.completions.create(model="small", prompt=texts, max_tokens=2, n=2)
    assert again.usage.prompt_tokens_details.cached_tokens == sum((len(text) - 1) // 64 * 64 for text in texts)


def test_a_stop_string_ends_the_text_before_it(client, server):
    whole = server.greedy(PROMPTS[1], 30)
    stop = whole[11:14]
    asked = {"model": "small", "prompt": PROMPTS[1], "max_tokens": 30, "temperature": 0, "stop": [stop, "Z"]}
    found = client.completions.create(**asked).choices[0]
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == found.text
    assert pieces[-1].finish_reason == "stop"


def test_the_next_turn_reads_what_is_new(client, server):
    text = "A long beginning that is read once. " * 5
    first = client.completions.create(model="small", prompt=text, max_tokens=10, temperature=0)
    longer = text + first.choices[0].text + " And then?"
    second = client.completions.create(model="small", prompt=longer, max_tokens=10, temperature=0)
    assert second.choices[0].text == server.greedy(longer, 10)
    assert second.usage.prompt_tokens_details.cached_tokens == len(text) + 9


def test_a_turn_of_a_chat_reads_what_is_new_however_long_the_chat_is(client, server):
    """The client sends all messages, as OpenAI's interface has it; the server has read those before."""
    messages, read = [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: {'and so on ' * 5}"})
        answer = client.chat.completions.create(model="small", messages=messages, max_tokens=12, temperature=0)
        text = answer.choices[0].message.content
        assert text == server.greedy(
            "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: ", 12
        )
        messages.append({"role": "assistant", "content": text})
        read.append(answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens)
    new = f"x\nuser: {messages[0]['content']}\nassistant: "  # the last token of an answer is not fed
    assert read[1:] == [len(new)] * 3
    assert answer.usage.prompt_tokens > 4 * len(new)


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("small").id == "small"
    assert model.state_bytes > 0
    assert model.state_bytes_per_token == 0
    assert model.key_value_bytes_per_token == 2 * 2 * 64 * 4


def test_who_leaves_a_stream_frees_the_slot(client, server):
    server.engine.pace = 0.01
    before = server.worker.metrics.finished["cancelled"]
    stream = client.completions.create(model="small", prompt="x", max_tokens=2000, stream=True)
    next(iter(stream))
    assert not server.engine.is_idle
    stream.close()
    assert server.idle()
    assert server.worker.metrics.finished["cancelled"] == before + 1


def test_who_leaves_without_an_answer_frees_the_slot(client, server):
    server.engine.pace = 0.01
    before = server.worker.metrics.finished["cancelled"]
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="small", prompt="x", max_tokens=2000, n=2, timeout=0.3)
    assert server.idle()
    assert server.worker.metrics.finished["cancelled"] == before + 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_told_and_the_server_goes_on(client, server, stream):
    asked = {"model": "small", "prompt": "x", "max_tokens": 5, "temperature": 0}
    server.engine.failure = MemoryError("not\nenough")
    with pytest.raises(openai.APIError, match="MemoryError: not enough"):
        list(client.completions.create(**asked, stream=stream))
    assert client.completions.create(**asked).choices[0].text == server.greedy("x", 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "expected the model 'small'"),
        (
            {"max_tokens": 2001},
            openai.BadRequestError,
            "max_tokens: expected .* from 1 to 2000, found 2001",
        ),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": [1, 257]}, openai.BadRequestError, "expected token ids from 0 to 256, found 1 to 257"),
        ({"n": 100}, openai.BadRequestError, "expected at most 68 continuations"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(client, changes, error, message):
    with pytest.raises(error, match=message):
        client.completions.create(**{"model": "small", "prompt": "x", **changes})


def test_a_chat_without_a_template_is_refused_with_the_remedy(serve):
    asked = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
    refused = pytest.raises(openai.BadRequestError, match=r"no chat template.*--chat-template FILE")
    with serve(without_template=True) as running, client_of(running) as client, refused:
        client.chat.completions.create(**asked)


def test_when_all_is_taken_a_client_is_told_when_to_come_again(serve):
    with serve(slots=1, queue=1) as running:
        running.engine.pace = 0.01
        with client_of(running) as client:
            asked = {"model": "small", "prompt": "x", "max_tokens": 2000, "stream": True}
            first = client.completions.create(**asked)
            next(iter(first))
            second = client.completions.create(**asked)
            with pytest.raises(openai.RateLimitError, match="the queue is full") as refused:
                client.completions.create(**asked)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            first.close()
            next(iter(second))  # which has the slot now
            second.close()
        assert running.idle()
        assert running.worker.metrics.refused == 1


def test_the_token_is_asked_for(serve):
    with serve(token="secret") as running:
        with client_of(running, "secret") as client:
            assert client.models.list().data
        for key in ("secre", "secret2", "Secret", "x"):
            refused = pytest.raises(openai.AuthenticationError, match="Authorization: Bearer TOKEN")
            with client_of(running, key) as client, refused:
                client.models.list()


def test_a_server_that_stops_finishes_what_runs(serve):
    with ThreadPoolExecutor(1) as pool, serve() as running, client_of(running) as client:
        running.engine.pace = 0.005
        asked = {"model": "small", "prompt": "x", "max_tokens": 60, "temperature": 0, "stream": True}
        stream = client.completions.create(**asked)
        text = pool.submit(lambda: "".join(piece.choices[0].text for piece in stream))
        running.stop()
        assert text.result() == running.greedy("x", 60)
