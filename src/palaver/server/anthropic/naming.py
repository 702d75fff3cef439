"""How Anthropic's clients name what is called otherwise inside."""

from __future__ import annotations

NAMES = {
    "stop": "stop_sequences",
    "think": "thinking.type",
    "thinking_budget": "thinking.budget_tokens",
    "budget": "thinking.budget_tokens",
    "effort": "output_config.effort",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "constraint (json_schema)": "output_config.format",
    "constraint": "output_config.format",
}
