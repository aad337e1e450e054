"""Generation with a state gives what generation without a cache gives: tokens and logits, in constant memory."""

import contextlib
import copy

import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from attention.covering import first_always, pairs_always
from integrations.huggingface.counting import CHUNK, SHOWN, counting
from polysketch.integrations.huggingface import PolysketchCache

LENGTHS = (5, CHUNK + 1, 2 * CHUNK + 1, 47)
"""Of prompts padded to the longest: by 42, 30, 14 and 0 tokens, so that rows reach the ends of chunks apart."""
NEW = 22
GROWING = {"softmax"}
OTHERS = ("based", "performer")


def prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids padded on the left and their attention mask."""
    longest = max(lengths)
    ids = counting(len(lengths), longest, torch.Generator().manual_seed(3))
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


def generate(model, ids, mask, *, seed=0, **options):
    """`model.generate` with everything it can tell."""
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)


def assert_same(found, expected):
    """Equal tokens, and logits but for rounding."""
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == len(expected.logits)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)


MODES = {
    "greedy": {},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 30},
    "chunked prefill": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("mode", first_always([*MODES]))
def test_a_state_gives_what_no_cache_gives(model, mode):
    """For rows padded on the left by amounts that cross the ends of chunks."""
    ids, mask = prompts(*LENGTHS)
    options = MODES[mode]
    found = generate(model, ids, mask, **options)
    assert isinstance(found.past_key_values, PolysketchCache)
    uncached = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    expected = generate(model, ids, mask, use_cache=False, **uncached)
    assert_same(found, expected)
    assert len(set(found.sequences[:, ids.shape[1] :].flatten().tolist())) >= 20


def test_every_continuation_is_varied(model):
    """At least 20 different tokens in each greedy continuation: equal tokens could not come about by repetition."""
    ids, mask = prompts(*LENGTHS)
    new = generate(model, ids, mask).sequences[:, ids.shape[1] :]
    assert min(len(set(row.tolist())) for row in new) >= 20


def test_padding_on_the_left_changes_nothing(model):
    """Each row alone, without padding, is continued alike."""
    ids, mask = prompts(*LENGTHS)
    together = generate(model, ids, mask)
    for row, length in enumerate(LENGTHS):
        alone = generate(model, ids[row : row + 1, -length:], mask[row : row + 1, -length:])
        assert torch.equal(alone.sequences[0, length:], together.sequences[row, ids.shape[1] :])
        torch.testing.assert_close(
            torch.stack(alone.logits)[:, 0], torch.stack(together.logits)[:, row], rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("whole", first_always([False, True]), ids=["new tokens alone", "all tokens given again"])
def test_several_turns_go_on_from_one_cache(model, whole):
    """What `generate` gave and new words after it, with the cache of the turn before; some rows padded."""
    ids, mask = prompts(*LENGTHS)
    first = generate(model, ids, mask, max_new_tokens=9)
    more = counting(len(LENGTHS), 11, torch.Generator().manual_seed(8))
    turn = torch.cat([first.sequences, more], 1)
    mask = torch.cat([mask, torch.ones(len(LENGTHS), turn.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    given = turn if whole else turn[:, first.past_key_values.get_seq_length() :]
    found = generate(model, given, mask, past_key_values=first.past_key_values)
    expected = generate(model, turn, mask, use_cache=False)
    assert torch.equal(found.sequences[:, -NEW:], expected.sequences[:, -NEW:])
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)


def test_a_prompt_read_in_parts_may_begin_with_a_part_of_padding(model):
    """And a row of padding alone is refused all the same."""
    ids, mask = prompts(5, 47)
    assert_same(generate(model, ids, mask, prefill_chunk_size=7), generate(model, ids, mask))
    with pytest.raises(ValueError, match="padding alone in row 0"):
        generate(model, ids, mask * torch.tensor([[0], [1]]), prefill_chunk_size=7)


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(model):
    """And in it again."""
    ids, mask = prompts(*LENGTHS)
    expected = generate(model, ids, mask)
    with torch.inference_mode():
        first = generate(model, ids, mask, max_new_tokens=9)
    cache, tokens = first.past_key_values, first.sequences.clone()
    grown = torch.cat([mask, torch.ones(len(LENGTHS), 9, dtype=mask.dtype)], 1)
    tokens = generate(model, tokens, grown, past_key_values=cache, max_new_tokens=5).sequences
    grown = torch.cat([grown, torch.ones(len(LENGTHS), 5, dtype=mask.dtype)], 1)
    with torch.inference_mode():
        last = generate(model, tokens, grown, past_key_values=cache, max_new_tokens=NEW - 14)
    assert torch.equal(last.sequences, expected.sequences)


def test_tokens_recorded_in_inference_mode_are_taken_back_outside_of_it(model):
    ids, _ = prompts(47)
    cache = PolysketchCache()
    cache.activate_past_recording()
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=cache, use_cache=True)
        model(ids[:, 40:43], past_key_values=cache, use_cache=True)
    model(ids[:, 43:45], past_key_values=cache, use_cache=True)
    cache.crop(-4)
    found = model(ids[:, 41:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(ids).logits[:, 41:], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "kind", ["polysketch-paper", *(pytest.param(x, marks=pytest.mark.full) for x in ("softmax", *OTHERS))]
)
def test_the_state_does_not_grow(counting_model, kind):
    """Not by a byte from 20 tokens to 100; keys and values of softmax do."""
    model = counting_model(kind)
    ids, mask = prompts(20, 17)
    sizes = [generate(model, ids, mask, max_new_tokens=new).past_key_values.nbytes for new in (1, 30, 81)]
    assert sizes[0] > 0
    assert (len(set(sizes)) == 1) == (kind not in GROWING)
    assert sizes == sorted(sizes)


def test_a_common_beginning_is_read_once(model):
    """Copies of a cache go on by themselves, and leave it as it is."""
    ids, _ = prompts(40)
    common = PolysketchCache()
    model(ids[:, :33], past_key_values=common, use_cache=True)
    for tail in (ids[:, 33:], ids[:, 34:]):
        turn = torch.cat([ids[:, :33], tail], 1)
        found = generate(model, turn, torch.ones_like(turn), past_key_values=copy.deepcopy(common))
        assert_same(found, generate(model, turn, torch.ones_like(turn), use_cache=False))
    assert common.get_seq_length() == 33


@contextlib.contextmanager
def counted_calls(model):
    """A list that gets an entry for each forward pass of the model."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


def assistant_of(counting_model, kind: str):
    """A model of another kind, which counts as well and errs elsewhere."""
    return counting_model("based" if kind == "polysketch-paper" else "polysketch-paper")


@pytest.mark.parametrize(
    ("kind", "sample", "draft"),
    pairs_always(
        {
            "kind": ("polysketch-paper", "based", "softmax"),
            "sample": (False, True),
            "draft": ("prompt lookup", "assistant"),
        }
    ),
)
def test_assisted_decoding_gives_the_same_tokens(counting_model, kind, sample, draft):
    """In fewer passes, for drafts are accepted; whoever drafts, greedy tokens are those of plain decoding."""
    model = counting_model(kind)
    ids = counting(1, 70, torch.Generator().manual_seed(4))
    drafts = {"prompt_lookup_num_tokens": 5}
    if draft == "assistant":
        drafts = {"assistant_model": assistant_of(counting_model, kind)}
    mask = torch.ones_like(ids)
    options = {"do_sample": True, "top_k": 1} if sample else {}
    with counted_calls(model) as calls:
        found = generate(model, ids, mask, **drafts, **options)
    assert_same(found, generate(model, ids, mask, use_cache=False))
    assert len(calls) <= NEW * 3 // 4  # a pass gives one token of the model's own, and those accepted before it


@pytest.mark.parametrize("kind", [*SHOWN, pytest.param("softmax", marks=pytest.mark.full)])
def test_an_assistant_drafts_what_it_would_say_alone(counting_model, kind, monkeypatch):
    """After every rejection too: its cache has then forgotten the draft. A wrong draft costs time alone, not tokens."""
    drafts, propose = [], AssistedCandidateGenerator.get_candidates

    def remember(self, input_ids, *args, **kwargs):
        candidates = propose(self, input_ids, *args, **kwargs)
        drafts.append((input_ids.clone(), candidates[0].clone()))
        return candidates

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", remember)
    assistant = assistant_of(counting_model, kind)
    ids = counting(1, 70, torch.Generator().manual_seed(4))
    sequences = generate(counting_model(kind), ids, torch.ones_like(ids), assistant_model=assistant).sequences
    kept = 0
    for given, draft in drafts:
        new = draft.shape[1] - given.shape[1]
        if new:
            alone = generate(assistant, given, torch.ones_like(given), max_new_tokens=new, use_cache=False)
            assert torch.equal(draft, alone.sequences)
        kept += torch.equal(draft, sequences[:, : draft.shape[1]])
    assert 0 < kept < len(drafts)  # drafts that were accepted whole, and others


def test_drafts_are_both_accepted_and_rejected(counting_model, monkeypatch):
    """Or the tests above would show nothing."""
    removed = []
    crop = PolysketchCache.crop
    monkeypatch.setattr(PolysketchCache, "crop", lambda self, n: (removed.append(-int(n)), crop(self, n))[1])
    ids = counting(1, 70, torch.Generator().manual_seed(4))
    generate(counting_model("polysketch-paper"), ids, torch.ones_like(ids), prompt_lookup_num_tokens=5)
    assert min(removed) == 0 < max(removed)


def test_a_pipeline_generates(counting_model, tmp_path):
    """From a saved folder, by task and path alone."""
    from transformers import pipeline

    from polysketch.data.tokenization import BytesTokenizer
    from polysketch.integrations.huggingface import PolysketchConfig, PolysketchForCausalLM, to_fast_tokenizer

    torch.manual_seed(0)
    config = PolysketchConfig.from_preset("tiny", num_layers=1, attention_options={"window": 16, "sketch_size": 8})
    model = PolysketchForCausalLM(config)
    tokenizer = to_fast_tokenizer(BytesTokenizer())
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    texts = ["to be or not to be, that", "é"]
    found = generator(texts, max_new_tokens=30, do_sample=False, batch_size=2, return_full_text=False)
    for text, [answer] in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")
        expected = model.eval().generate(**ids, max_new_tokens=30, do_sample=False, use_cache=False)
        assert answer["generated_text"] == tokenizer.decode(expected[0, ids["input_ids"].shape[1] :])
