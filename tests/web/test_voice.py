"""The page speaks: a player for each message, replies that are read while they come, and a stop that is one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from palaver.engines.core.token_masks import unspeakable_characters
from tests.web.conftest import Served, stored, text_of
from tests.web.screen import act, ask, conversation, ended, last_reply, message_id
from tests.web.test_manners import axe_violations

pytest.importorskip("espeakng_loader")

LEVEL = """async (address) => {
  const data = await (await fetch(address)).arrayBuffer()
  const sound = await new OfflineAudioContext(1, 1, 24000).decodeAudioData(data)
  const samples = sound.getChannelData(0)
  return [sound.duration, Math.sqrt(samples.reduce((sum, one) => sum + one * one, 0) / samples.length)]
}"""


def player(of: Locator) -> Locator:
    return of.get_by_role("group", name="Speech")


def plays(of: Locator) -> Locator:
    """Its sound, once some of it was heard."""
    sound = player(of).locator("audio")
    expect(sound).to_have_js_property("paused", False)
    sound.evaluate(
        """(audio) => new Promise((resolve) => {
          const look = () => (audio.currentTime > 0.2 ? resolve(true) : requestAnimationFrame(look))
          look()
        })"""
    )
    return sound


def test_a_message_is_read_aloud_and_stops(page: Page, sprout: Served) -> None:
    page.goto(sprout.url)
    ask(page, "Who are you?")
    reply = ended(page)
    expect(player(reply)).to_have_count(0)
    act(reply, "Read aloud")
    sound = plays(reply).element_handle()
    assert sound is not None
    assert axe_violations(page) == []
    seconds, level = page.evaluate(LEVEL, f"api/messages/{message_id(reply)}/speech")
    assert seconds > 1
    assert level > 0.02
    player(reply).get_by_role("button", name="Stop reading").click()
    expect(player(reply)).to_have_count(0)
    assert sound.evaluate("audio => audio.paused && !audio.hasAttribute('src')")
    act(page.locator("article.user"), "Read aloud")
    plays(page.locator("article.user"))


def test_with_the_voice_on_replies_are_spoken_as_they_come(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    switch = page.get_by_role("button", name="Voice", exact=True)
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "true")
    ask(page, "Write a haiku about rain.")
    plays(last_reply(page))
    kept = stored(api, conversation(page))[-1]
    assert kept["reply"]["settings"]["sampling"]["spoken"] is True
    assert not set(text_of(kept)) & unspeakable_characters()
    ended(page)
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "false")
    ask(page, "What is 12 + 30?")
    expect(player(ended(page))).to_have_count(0)


def test_stopping_the_reply_stops_its_sound(page: Page, tmp_path: Path, built: None) -> None:
    """The sound is heard while the reply still comes."""
    answer = "This is the first sentence. " + "And here comes another one, which is a little longer. " * 40
    with Served(tmp_path, "--rate", "30", script=[{"thought": "", "answer": answer}]) as served:
        page.goto(served.url)
        page.get_by_role("button", name="Voice", exact=True).click()
        ask(page, "Go on.")
        sound = plays(last_reply(page)).element_handle()
        expect(last_reply(page)).to_have_attribute("data-status", "running")
        page.get_by_role("button", name="Stop", exact=True).click()
        reply = ended(page, "stopped")
        expect(player(reply)).to_have_count(0)
        assert sound is not None
        assert sound.evaluate("audio => audio.paused")
        act(reply, "Read aloud")
        plays(reply)
