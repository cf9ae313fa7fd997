"""The page in a real browser: a prompt is typed, and its answer streams in, coloured by probability."""

from __future__ import annotations

import re

import pytest

from mega.core.inference.server.app import PAGE
from tests.inference.server.conftest import ANSWER, Running
from tests.support.chromium import BROWSER, Chromium
from tests.support.fake_engine import FakeEngine


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|openapi|metrics|health)""", text)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_person_continues_a_text_and_converses(server: Running, engine: FakeEngine) -> None:
    engine.seconds = 0.2
    try:
        with Chromium(server.url, 390, 844, phone=True) as page:
            page.wait("document.querySelector('#model').textContent.startsWith('fake')")
            assert page.js("document.documentElement.scrollWidth <= innerWidth")
            page.type("#prompt", "Once <b>upon</b>")
            page.js("document.querySelector('#go').click()")
            page.wait("document.querySelectorAll('.token').length > 2")  # before it is all there
            assert page.js("document.querySelector('#go').textContent") == "Stop"
            engine.seconds = 0
            page.wait("document.querySelector('#go').textContent === 'Generate'")
            text = page.js("document.querySelector('#answer').textContent")
            assert text == f"Once <b>upon</b>{ANSWER}"
            assert page.js("getComputedStyle(document.querySelector('.token')).backgroundColor") != "rgba(0, 0, 0, 0)"
            assert "ended by the model" in page.js("document.querySelector('#figures').textContent")
            assert engine.seen[-1].adapter is None
            page.js("document.querySelector('#adapter').value = 'poet'")
            page.js("for (const each of ['#mode-chat', '#clear']) document.querySelector(each).click()")
            page.type("#prompt", "Hi")
            page.js("document.querySelector('#go').click()")
            page.wait("document.querySelector('#go').textContent === 'Send'")
            turns = "[...document.querySelectorAll('.turn')].map(turn => turn.textContent)"
            assert engine.seen[-1].adapter == "poet"
            assert page.js(turns) == ["Hi", ANSWER] and engine.seen[-1].prompt == tuple(b"User: Hi\n\nAssistant:")
            page.js("document.querySelector('#max_tokens').value = 100000")
            page.type("#prompt", "more")
            page.js("document.querySelector('#go').click()")
            page.wait("!document.querySelector('#error').hidden")
            assert "maximum context length" in page.js("document.querySelector('#error').textContent")
    finally:
        engine.seconds = 0
