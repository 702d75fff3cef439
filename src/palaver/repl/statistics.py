"""The line after a turn: what it took, and how it ended where that is worth saying."""

from __future__ import annotations

from palaver.events import Failed, Finished, Usage
from palaver.generation import Finish
from palaver.repl.thinking import seconds, tokens
from palaver.store import ReplyStatus, StoredReply

ENDINGS = {
    Finish.STOPPED: "stopped: /continue goes on",
    Finish.LENGTH: "length: /continue goes on",
    Finish.STOP_STRING: "stop string",
}


def line(
    ending: Finished | Failed,
    first: float | None = None,
    before: StoredReply | None = None,
    after: StoredReply | None = None,
) -> str:
    """One line, and a second one for an ending that is worth telling.

    `first`: seconds until something came; `before` and `after`: the reply's record around this run of it.
    """
    if isinstance(ending, Failed):
        interrupted = after is not None and after.status is ReplyStatus.INTERRUPTED
        return "interrupted: /continue goes on" if interrupted else f"failed: {ending.error}"
    usage = ending.usage
    parts = [_counts(usage)]
    if (speed := rate(usage, first, before, after)) is not None:
        parts.append(f"{speed:.0f} tokens/s" if speed >= 10 else f"{speed:.1f} tokens/s")
    if first is not None:
        parts.append(f"first {seconds(first)}")
    if usage.prompt_tokens:
        known = min(usage.cached_tokens, usage.prompt_tokens)  # of a reply that goes on, more than the prompt is
        cached = f" ({known:,} cached)" if known else ""
        parts.append(f"prompt {usage.prompt_tokens:,}{cached}")
    told = " · ".join(parts)
    if ending.finish not in ENDINGS:
        return told
    stop = f" {ending.stop!r}" if ending.stop else ""
    return f"{told}\n{ENDINGS[ending.finish]}{stop}"


def rate(usage: Usage, first: float | None, before: StoredReply | None, after: StoredReply | None) -> float | None:
    """Tokens a second after the first one, by the clock of whoever ran the model."""
    if after is None or "seconds" not in after.timings:
        return None
    said, took, waited = usage.reply_tokens, after.timings["seconds"], after.timings.get("first_token", 0.0)
    if before is not None and before.usage is not None:  # it went on from an earlier run
        said -= before.usage.reply_tokens
        took -= before.timings.get("seconds", 0.0)
        waited = min(first or 0.0, took)
    return (said - 1) / (took - waited) if said > 1 and took > waited else None


def _counts(usage: Usage) -> str:
    """All, and those that were thought; the rest is not all answer, for markers are tokens too."""
    thought = f" ({usage.thinking_tokens:,} thinking)" if usage.thinking_tokens else ""
    return tokens(usage.reply_tokens) + thought
