"""Attached files, and the media of tool results, as the model reads them."""

from __future__ import annotations

import pytest

from palaver.chat.attachments import NOT_SEEN, describe_result_media
from palaver.messages import Image, Message, Role, ToolResult

LINE = NOT_SEEN.format(media="[image/png]")


@pytest.mark.parametrize("text", ["", "Here it is.", "\n\n  indented\n"])
def test_a_picture_that_the_model_does_not_see_adds_a_line_to_the_result(text: str) -> None:
    message = Message(Role.TOOL, (ToolResult("c1", text, "look"), Image("image/png", b"PNG")))
    (described,) = describe_result_media([message], ())
    assert described.parts == (ToolResult("c1", f"{text}\n{LINE}" if text else LINE, "look"),)
    assert describe_result_media([message], ("image",)) == (message,)
