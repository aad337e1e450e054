"""The page in a browser, as a person uses it: types, reads the answer as it comes, stops it, and reads the meter."""

import pytest

from serving.browser import ENTER, ESCAPE, TAB, found, opened

pytestmark = [
    pytest.mark.full,  # a browser takes its time to begin
    pytest.mark.skipif(found() is None, reason="no Chromium with its driver on this machine"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def number(text: str) -> int:
    return int(text.replace(",", "").split()[0])


def test_a_person_chats_by_the_keyboard_alone(server, browser):
    """Enter sends, the answer grows, Escape stops it, and the next question knows of both."""
    server.engine.pace = 0.05
    browser.open(server.address)
    browser.wait(lambda: browser.text("#name") == "small")
    browser.run("document.getElementById('most').value = 2000")
    browser.press(f"Hi there{ENTER}")
    first = browser.wait(lambda: browser.text("#log .assistant"))
    browser.wait(lambda: len(browser.text("#log .assistant")) > len(first) + 3)
    assert not server.engine.is_idle
    browser.press(ESCAPE)
    assert server.idle()
    assert server.worker.metrics.finished["cancelled"] >= 1
    browser.wait(lambda: browser.text("#status") == "Stopped.")
    stopped = browser.text("#log .assistant")
    position = number(browser.text("#position"))
    assert position == len(f"user: Hi there\nassistant: {stopped}")
    server.engine.pace = 0.0
    browser.run("document.getElementById('most').value = 60")
    browser.press(f"And{ENTER}")
    browser.wait(lambda: "most new tokens" in browser.text("#status"))
    said = [f"user: Hi there\nassistant: {stopped}\nuser: And\nassistant: ", browser.text("#log p:last-child")]
    assert len(said[1]) == 60
    assert number(browser.text("#position")) == len("".join(said))


def test_the_meter_says_what_a_cache_would_hold(server, browser):
    """The state stays, the cache grows with the position."""
    browser.open(server.address)
    browser.wait(lambda: browser.text("#name") == "small")
    browser.run("document.getElementById('most').value = 60")
    state = browser.text("#state")
    assert state == f"{server.engine.slots.nbytes // server.engine.slots.count / 1000:.0f} kB"
    browser.press(f"One{ENTER}")
    browser.wait(lambda: "most new tokens" in browser.text("#status"))
    position = number(browser.text("#position"))
    assert browser.text("#cache") == f"{position * 1024 / 1000:.3g} kB"
    assert browser.text("#state") == state
    assert "tokens/s" in browser.text("#speed")
    width = "return document.getElementById(arguments[0]).style.width"
    widths = [browser.run(width, name) for name in ("state-bar", "cache-bar")]
    assert sorted(widths)[0] == "100%"


def test_a_text_is_continued_where_there_is_no_chat_template(serve, browser):
    """What was written and what came are the next prompt."""
    with serve(without_template=True) as running:
        browser.open(running.address)
        browser.wait(lambda: browser.text("#name") == "small")
        browser.run("document.getElementById('temperature').value = 0; document.getElementById('most').value = 20")
        browser.press(f"Once {ENTER}")
        browser.wait(lambda: "most new tokens" in browser.text("#status"))
        first = running.greedy("Once ", 20)
        assert browser.text("#log") == f"Once {first}"
        browser.press(f" and{ENTER}")
        browser.wait(lambda: len(browser.text("#log p:last-child")) == 20)
        assert browser.text("#log") == f"Once {first} and{running.greedy(f'Once {first} and', 20)}"
        browser.click("#new")
        assert "Write the beginning" in browser.text("#log")
        assert browser.text("#position") == "0 tokens"


def test_a_page_asks_for_the_token_that_the_server_wants(serve, browser):
    with serve(token="secret") as running:
        browser.open(running.address)
        browser.wait(lambda: "access token" in browser.text("#status"))
        assert browser.run("return document.activeElement.id") == "token"
        browser.press(f"secret{TAB}")
        browser.wait(lambda: browser.text("#name") == "small")
        assert browser.text("#status") == ""


def test_an_error_is_shown_and_the_page_goes_on(server, browser):
    server.engine.failure = MemoryError("not enough")
    browser.open(server.address)
    browser.wait(lambda: browser.text("#name") == "small")
    browser.press(f"Hi{ENTER}")
    browser.wait(lambda: browser.text("#status") == "MemoryError: not enough")
    assert browser.run("return document.querySelectorAll('#log .assistant').length") == 0
    browser.run("document.getElementById('most').value = 5")
    browser.press(f"Again{ENTER}")
    browser.wait(lambda: len(browser.text("#log p:last-child")) == 5)


def test_on_a_phone_all_is_in_view(server, browser):
    """390 pixels: nothing is cut off to the side, and what is pressed is large enough for a thumb."""
    browser.resize(390, 760)
    browser.open(server.address)
    browser.wait(lambda: browser.text("#name") == "small")
    server.engine.pace = 0.05
    browser.run("document.getElementById('most').value = 2000")
    browser.press(f"A long word: {'x' * 60}{ENTER}")
    browser.wait(lambda: browser.text("#log .assistant"))
    browser.click("#stop")
    server.engine.pace = 0.0
    assert server.idle()
    assert browser.run("return document.documentElement.scrollWidth") == 390
    boxes = browser.run(
        "return [...document.querySelectorAll('form button, textarea, dd')]"
        ".map(each => each.getBoundingClientRect()).map(box => [box.left, box.right, box.bottom, box.height])"
    )
    assert all(left >= 0 and right <= 390 and bottom <= 760 for left, right, bottom, _ in boxes)
    assert all(height >= 44 for *_, height in boxes[-3:])
