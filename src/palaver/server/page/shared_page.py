"""The page behind a share link: one branch of a conversation as static HTML.

It needs no key, sets no cookie and runs no script. Its policy allows one style and nothing else, and its sandbox makes
its origin an opaque one, so that it can't access this server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from cachetools import TTLCache
from fastapi import APIRouter, Request, Response
from markdown_it import MarkdownIt
from markdown_it.token import Token

from palaver.messages import Role, Text, Thinking, ToolCall, ToolResult
from palaver.server.page.routes import HEADERS
from palaver.server.sse import run_while_connected
from palaver.server.state import ServerState, StateDep
from palaver.store import Blob, Conversation, StoredMessage
from palaver.store.share_links import Share

PREFIX = "/share/"
MAX_CHARACTERS = 2_000_000
"""Of the texts of one page. Later messages are left out."""
_CACHED_PAGES = 64
_CACHE_SECONDS = 60.0
_FILE = re.compile(r"^\n*File ([^\n]{1,200}):\n\n")
_ALIGNED = re.compile(r"text-align:(left|center|right)")
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 46rem; padding: 1.5rem 1rem 3rem; font: 1rem/1.6 system-ui, sans-serif;
  background: light-dark(#f7f6f3, #17191c); color: light-dark(#22262a, #e6e4df); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; }
a { color: light-dark(#0b6357, #6cc7b6); }
article { margin-block: 1.4rem; }
.user { background: light-dark(#efede8, #272b30); border-radius: 14px; padding: 0.6rem 1rem; }
.user p { white-space: pre-wrap; margin: 0; }
.who, footer, summary { color: light-dark(#5b6167, #a3a8ae); font-size: 0.875rem; }
.who { margin: 0; font-weight: 600; }
pre { overflow-x: auto; padding: 0.6rem 0.8rem; border-radius: 10px; background: light-dark(#efede8, #272b30);
  font: 0.875rem/1.55 ui-monospace, monospace; }
details pre { white-space: pre-wrap; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid light-dark(#d9d6cf, #363b42); padding: 0.35rem 0.7rem; }
.left { text-align: left; } .center { text-align: center; } .right { text-align: right; }
blockquote { margin-inline: 0; padding-inline-start: 1rem;
  border-inline-start: 3px solid light-dark(#d9d6cf, #363b42); }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{_STYLE_HASH}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "sandbox allow-popups allow-popups-to-escape-sandbox",
    )
)
SHARED_HEADERS = HEADERS | {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "x-robots-tag": "noindex, nofollow, noarchive",
}
_GONE = "This link doesn’t exist, or it has ended."


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    pages: TTLCache[str, str] = TTLCache(_CACHED_PAGES, _CACHE_SECONDS)

    @routes.api_route(PREFIX + "{token}", methods=["GET", "HEAD"])
    async def shared(token: str, request: Request, state: StateDep) -> Response:
        share = await state.workers.run(state.service.store.shares.find, token) if state.settings.share else None
        if share is None:
            return _respond(_document("Palaver", f"<main><h1>{_GONE}</h1></main>"), 404)
        if share.id not in pages:
            pages[share.id] = await run_while_connected(request, state.workers.run(_render, state, share))
        return _respond(pages[share.id], 200)

    return routes


def _respond(html: str, status: int) -> Response:
    return Response(html, status, SHARED_HEADERS, "text/html")


def _render(state: ServerState, share: Share) -> str:
    store = state.service.store
    return render_page(store.conversations.get(share.conversation_id), store.messages.path(share.leaf_id), share)


def render_page(conversation: Conversation, path: Sequence[StoredMessage], share: Share) -> str:
    markdown, articles, left = _markdown(), [], MAX_CHARACTERS
    for message in path:
        html = "".join(_parts(markdown, message, share))
        left -= len(html)
        if left < 0:
            articles.append("<p>The rest is too long to be shown.</p>")
            break
        if html:
            is_user = message.role is Role.USER
            who = f'<p class="who">{"You" if is_user else "Reply"}</p>'
            articles.append(f'<article class="{"user" if is_user else "reply"}">{who}{html}</article>')
    until = share.expires_at.strftime("%Y-%m-%d %H:%M UTC")
    footer = f"<footer>A conversation with a model, shared until {until}.</footer>"
    title = conversation.title or "Conversation"
    return _document(title, f"<main><h1>{escape(title)}</h1>{''.join(articles)}</main>{footer}")


def _parts(markdown: MarkdownIt, message: StoredMessage, share: Share) -> Iterator[str]:
    """The HTML of the parts that the link shows. System prompts are never shown, files only by their names."""
    if message.role is Role.SYSTEM:
        return
    for part in message.parts:
        match part:
            case Text(text) if message.role is Role.USER:
                file = _FILE.match(text)
                yield f"<p>[{escape(file[1])}]</p>" if file else f'<p dir="auto">{escape(text)}</p>' if text else ""
            case Text(text):
                yield f'<div dir="auto">{markdown.render(text)}</div>' if text.strip() else ""
            case Thinking(text) if share.thoughts and text.strip():
                yield _details("Thought", text)
            case ToolCall(_, name, arguments) if share.tools:
                yield _details(f"Tool call: {name}", arguments)
            case ToolResult(content=content, name=name) if share.tools:
                yield _details(f"Result: {name}", content)
            case Blob():
                yield f"<p>[{escape(part.name or part.kind)}]</p>"
            case _:
                pass


def _details(summary: str, text: str) -> str:
    return f'<details><summary>{escape(summary)}</summary><pre dir="auto">{escape(text)}</pre></details>'


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>"
    )


def _markdown() -> MarkdownIt:
    """HTML in Markdown is text. Pictures, which would tell their server who reads this, are links."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    markdown.validateLink = lambda url: re.match(r"(https?:|mailto:)", url.strip(), re.IGNORECASE) is not None  # type: ignore[method-assign]
    markdown.core.ruler.push("safe", lambda state: _make_safe(state.tokens))
    return markdown


def _make_safe(tokens: Iterable[Token]) -> None:
    for token in tokens:
        if token.type == "link_open":
            token.attrs |= {"rel": "noopener noreferrer nofollow", "target": "_blank"}
        elif token.type in ("th_open", "td_open"):
            side = _ALIGNED.search(str(token.attrs.pop("style", "")))
            token.attrs |= {"class": side[1]} if side else {}
        for index, child in enumerate(token.children or ()):
            if child.type == "image":
                token.children[index] = Token("text", "", 0, content=f"[{child.content}]({child.attrs.get('src', '')})")  # type: ignore[index]
        _make_safe(token.children or ())
