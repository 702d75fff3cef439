"""Clients that send text back: the token ids of a reply are found by its text."""

from __future__ import annotations

import httpx

from palaver.messages import assistant, user
from palaver.server.state import ReplyIndex
from tests.server.chat_client import complete

BEFORE = (user("Hello"),)
REPLY = assistant("Good day", thinking="Greet back.")


def test_a_reply_is_found_by_what_led_to_it_and_its_words() -> None:
    reply_index = ReplyIndex()
    reply_index.add("me", BEFORE, REPLY, (1, 2, 3))
    without = assistant("Good day")
    assert reply_index.lookup("me", (*BEFORE, without, user("And?")), [None]) == ((1, 2, 3),)
    assert reply_index.lookup("you", (*BEFORE, without), [None]) == (None,)
    assert reply_index.lookup("me", (user("Hi"), without), [None]) == (None,)
    assert reply_index.lookup("me", (*BEFORE, assistant("Good evening")), [None]) == (None,)
    assert reply_index.lookup("me", (*BEFORE, without), [(7,)]) == ((7,),)


def test_what_was_not_asked_for_longest_is_forgotten() -> None:
    reply_index = ReplyIndex(max_tokens=5)
    for number in range(4):
        reply_index.add("me", (user(str(number)),), REPLY, (number, number))
    found = [reply_index.lookup("me", (user(str(number)), REPLY), [None])[0] for number in range(4)]
    assert found == [None, None, (2, 2), (3, 3)]


def test_the_words_of_a_client_without_a_conversation_come_back_as_the_tokens_they_were(http: httpx.Client) -> None:
    """Sampled wildly, so that words are spelled by tokens that their text would not be encoded to."""
    question = {"role": "user", "content": "Tell me something about rivers and words."}
    how = {"enable_thinking": False, "temperature": 2.5, "seed": 5, "max_tokens": 60, "return_token_ids": True}
    first = complete(http, messages=[question], **how)["choices"][0]
    said = {"role": "assistant", "content": first["message"]["content"]}
    second = complete(http, messages=[question, said, {"role": "user", "content": "And more?"}], **how)
    prompt = ",".join(map(str, second["prompt_token_ids"]))
    assert ",".join(map(str, first["token_ids"])) in prompt
