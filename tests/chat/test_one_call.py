"""With `one_call`, a reply is complete after its first call, however it is read again."""

from __future__ import annotations

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.formats.base import RenderOptions
from palaver.generation import Finish
from palaver.messages import user
from palaver.sampling import Sampling
from tests.formats.families import FAMILIES, TOOLS, ids, make_format
from tests.scripted_engine import ScriptedEngine


async def test_the_reply_is_complete_with_its_first_call() -> None:
    format, pieces = make_format(FAMILIES["JSON in tags"])
    twice = next(case for case in FAMILIES["JSON in tags"].replies if len(case.calls) == 2)
    script = [*ids(pieces, twice.text), pieces.control["<|done|>"]]
    model = Model(ScriptedEngine([script], pieces.vocabulary), format, "scripted", "pieces", pieces.vocabulary)
    both = await model.reply(ReplyRequest((user("q"),), Sampling(), TOOLS))
    one = await model.reply(ReplyRequest((user("q"),), Sampling(), TOOLS, RenderOptions(one_call=True)))
    assert both.message.tool_calls[:1] == one.message.tool_calls
    assert len(both.message.tool_calls) == 2
    assert one.finish is Finish.END
    assert len(one.token_ids) < len(both.token_ids)
    reader = model.reader(one.request, model.prompt(one.request, one.token_ids))
    reader.open()
    assert reader.complete
