"""The official SDK for Node, unchanged, fetched by npm once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.server.live_server import LiveServer

VERSION = "6"
PLACE = Path(tempfile.gettempdir()) / f"palaver-node-openai-{VERSION}"
SCRIPT = """
import OpenAI from 'openai';
const client = new OpenAI({baseURL: process.env.URL_, apiKey: 'none', maxRetries: 0});
const messages = [{role: 'user', content: 'What is 12 + 30?'}];
const asked = {model: 'sprout', messages, temperature: 0};
const out = {};
out.chat = (await client.chat.completions.create(asked)).choices[0].message.content;
out.stream = '';
for await (const piece of await client.chat.completions.create({...asked, stream: true}))
  out.stream += piece.choices[0]?.delta?.content ?? '';
const tools = [{type: 'function', function: {name: 'get_weather', description: 'Weather at a place.',
  parameters: {type: 'object', properties: {city: {type: 'string'}}, required: ['city']}}}];
const question = [{role: 'user', content: 'What is the weather in Paris?'}];
const first = (await client.chat.completions.create({...asked, messages: question, tools})).choices[0].message;
out.call = first.tool_calls[0].function;
const result = {role: 'tool', tool_call_id: first.tool_calls[0].id, content: '{"degrees": 21}'};
out.tools = (await client.chat.completions.create({...asked, messages: [...question, first, result], tools}))
  .choices[0].message.content;
const schema = {type: 'object', properties: {answer: {type: 'integer'}}, required: ['answer'],
  additionalProperties: false};
out.structured = JSON.parse((await client.chat.completions.create({...asked,
  response_format: {type: 'json_schema', json_schema: {name: 'sum', schema}}})).choices[0].message.content);
for (const [name, body] of [['bad', {...asked, n: 1e6}], ['missing', {...asked, model: 'gpt-4o'}]])
  try { await client.chat.completions.create(body); } catch (error) { out[name] = error.constructor.name; }
console.log(JSON.stringify(out));
"""


def sdk() -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not here: the SDK for Node was NOT tried")
    if not (PLACE / "node_modules" / "openai").is_dir():
        PLACE.mkdir(exist_ok=True)
        (PLACE / "package.json").write_text('{"private": true, "type": "module"}')
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"openai@{VERSION}"]
        if subprocess.run(command, cwd=PLACE, capture_output=True, check=False).returncode:
            pytest.skip("npm can't fetch the SDK for Node: it was NOT tried")
    return PLACE


def test_chat_streaming_tools_structured_output_and_errors(live: LiveServer) -> None:
    place = sdk()
    (place / "try.mjs").write_text(SCRIPT)
    environment = {**os.environ, "URL_": f"{live.url}/v1"}
    ran = subprocess.run(["node", "try.mjs"], cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    out = json.loads(ran.stdout)
    assert "42" in out["chat"]
    assert out["stream"] == out["chat"]
    assert json.loads(out["call"]["arguments"]) == {"city": "Paris"}
    assert "21" in out["tools"]
    assert isinstance(out["structured"]["answer"], int)
    assert (out["bad"], out["missing"]) == ("BadRequestError", "NotFoundError")
