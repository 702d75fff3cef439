"""Chat templates by the names that training configurations use, for models without one.

Each is written from the known format: markers, and the whitespace between them. In a format without a system role, the
system prompt is put before the first message. Formats with a built-in system prompt are left out.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

_BEFORE = """\
{%- set first = messages[0] -%}
{%- set before = first['content'] + '\\n\\n' if first['role'] == 'system' else '' -%}
"""

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

ALPACA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '### Instruction:\\n' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '### Response:\\n' + message['content'] + eos_token -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{{- '' if loop.last else '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\\n\\n### Response:\\n' -}}
{%- endif -%}
"""

DEEPSEEK = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜>' + message['content'] + eos_token -}}
{%- else -%}
{{- message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}
"""

GEMMA = (
    "{{- bos_token -}}\n"
    + _BEFORE
    + """\
{%- for message in (messages[1:] if before else messages) -%}
{%- set name = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + name + '\\n' + (before if loop.first else '') + message['content'] | trim -}}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
)

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

PHI = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def _mistral(opens: str, closes: str, answers: str) -> str:
    """The three versions differ only in whitespace."""
    return (
        "{{- bos_token -}}\n"
        + _BEFORE
        + f"""\
{{%- for message in (messages[1:] if before else messages) -%}}
{{%- if message['role'] == 'assistant' -%}}
{{{{- '{answers}' + message['content'] + eos_token -}}}}
{{%- else -%}}
{{{{- '{opens}' + (before if loop.first else '') + message['content'] + '{closes}' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
"""
    )


TEMPLATES = {
    "alpaca": ALPACA,
    "chatml": CHATML,
    "deepseek_v2": DEEPSEEK,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "mistral_v1": _mistral(" [INST] ", " [/INST]", " "),
    "mistral_v2v3": _mistral("[INST] ", "[/INST]", " "),
    "mistral_v3_tekken": _mistral("[INST]", "[/INST]", ""),
    "phi_35": PHI,
}


def find_template(name: str) -> str | None:
    """The chat template of that name: from an installed axolotl, else one of our own."""
    return _installed_template(name) or TEMPLATES.get(name)


def _installed_template(name: str) -> str | None:
    """The template of an installed axolotl. The package itself is not imported."""
    spec = find_spec("axolotl") if re.fullmatch(r"\w[\w.-]*", name) else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "utils" / "chat_templates" / "templates" / f"{name}.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
