"""Text as it comes: nothing is shown that a later token could take back."""

import pytest

from polysketch.generation import TextStream

TEXT = "naïve — 日本語 🙂 STOP and more"


def shown(text: str, stop: tuple[str, ...], size: int) -> tuple[list[str], bool]:
    """What is shown of a text whose tokens are `size` bytes each."""
    raw = text.encode()
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    stream = TextStream(lambda ids: b"".join(pieces[index] for index in ids), stop)
    found = []
    for token in range(len(pieces)):
        ended = stream.add(token)
        found.append(stream.take())
        if ended:
            break
    return [*found, stream.finish()], stream.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), TEXT),
        (("absent",), TEXT),
        (("STOP",), "naïve — 日本語 🙂 "),
        (("and", "STOP"), "naïve — 日本語 🙂 "),
        (("語",), "naïve — 日本"),
        (("more!", "re"), TEXT[:-2]),
        (("morello",), TEXT),
    ],
)
def test_the_text_before_the_first_stop_string_is_shown_and_no_more(size, stop, expected):
    pieces, stopped = shown(TEXT, stop, size)
    assert "".join(pieces) == expected
    assert stopped == (expected != TEXT)


def test_text_is_shown_as_soon_as_nothing_can_change_it():
    """A letter that begins no stop string at once, the beginning of one when it turns out to be none."""
    pieces, _ = shown("ab<en<end>", ("<end>",), 1)
    assert pieces == ["a", "b", "", "", "", "<en", "", "", "", "", ""]


def test_half_a_character_at_the_end_is_replaced():
    stream = TextStream(lambda ids: b"\xe6\x97")
    assert not stream.add(0)
    assert stream.take() == ""
    assert stream.finish() == "\ufffd"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(bytes, ("",))


def test_one_string_in_place_of_several_is_refused():
    """It would be taken letter by letter."""
    with pytest.raises(TypeError, match="expected a sequence of stop strings, found the string 'END'"):
        TextStream(bytes, "END")
