"""Small exports as ChatGPT and Claude write them, and their archives."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def node(id: str, parent: str | None, role: str = "", content: Any = None, **message: Any) -> dict[str, Any]:
    """A node of ChatGPT's mapping; without a role one without a message."""
    if isinstance(content, str):
        content = {"content_type": "text", "parts": [content]}
    about = {"author": {"role": role, "name": message.pop("name", None)}, "content": content, **message}
    return {"id": id, "parent": parent, "children": [], "message": {"id": id, **about} if role else None}


def thoughts(text: str) -> dict[str, Any]:
    return {"content_type": "thoughts", "thoughts": [{"summary": "Plan", "content": text}]}


PICTURE = {
    "content_type": "multimodal_text",
    "parts": [{"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-1a"}, "What is it?"],
}
CHATGPT = [
    {
        "title": "Trip",
        "create_time": 1700000000.5,
        "current_node": "a2",
        "mapping": {
            one["id"]: one
            for one in (
                node("root", None),
                node("s", "root", "system", ""),
                node(
                    "i",
                    "s",
                    "user",
                    {"content_type": "user_editable_context", "user_profile": "", "user_instructions": "Be brief."},
                ),
                node("q", "i", "user", "How do I get there?", create_time=1700000000.5),
                node("t1", "q", "assistant", thoughts("by rail or road")),
                node("r1", "t1", "assistant", {"content_type": "reasoning_recap", "content": "Thought for 2 s"}),
                node("a1", "r1", "assistant", "By train.", metadata={"model_slug": "m"}),
                node("t2", "q", "assistant", thoughts("the bus stops here")),
                node("a2", "t2", "assistant", "By bus.", status="finished_successfully"),
                node("q2", "a1", "user", PICTURE, metadata={"attachments": [{"id": "file-9", "name": "plan.pdf"}]}),
                node("c", "q2", "assistant", {"content_type": "code", "text": "1 + 1"}, recipient="python"),
                node("o", "c", "tool", {"content_type": "execution_output", "text": "2"}, name="python"),
                node("a3", "o", "assistant", "Two."),
                node("x", "q", "tool", "lonely", name="browser"),
                node("y", "q", "alien", "?"),
                node("z", "q2", "assistant", thoughts("hm"), status="in_progress"),
            )
        },
    }
]
CLAUDE = [
    {
        "uuid": "c",
        "name": "Sums",
        "chat_messages": [
            {
                "uuid": "1",
                "sender": "human",
                "text": "What is 17 * 23?",
                "content": [{"type": "text", "text": "What is 17 * 23?"}],
                "created_at": "2025-01-02T03:04:05.678Z",
                "attachments": [{"file_name": "a.txt", "extracted_content": "notes"}],
                "files": [{"file_name": "a.txt"}, {"file_name": "b.png"}],
                "parent_message_uuid": "00000000-0000-4000-8000-000000000000",
            },
            {
                "uuid": "2",
                "sender": "assistant",
                "text": "391",
                "content": [
                    {"type": "thinking", "thinking": "a product"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "u", "name": "calculate", "input": {"of": "17 * 23"}},
                    {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "391"}]},
                    {"type": "text", "text": "It's 391."},
                    {"type": "hologram"},
                ],
                "parent_message_uuid": "1",
            },
            {"uuid": "3", "sender": "assistant", "text": "About 400.", "parent_message_uuid": "1"},
            {"uuid": "4", "sender": "human", "text": "Thanks", "parent_message_uuid": "2"},
            {"uuid": "5", "sender": "alien", "text": "?"},
        ],
    }
]


def archive(conversations: Any, **files: bytes) -> bytes:
    """The ZIP archive of an export; `files` by name, with `_` for the dot."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("export/conversations.json", json.dumps(conversations))
        out.writestr("export/user.json", "{}")
        for name, data in files.items():
            out.writestr(name.replace("file_", "export/file-"), data)
    return file.getvalue()
