"""On PYTHONPATH it holds and slows the engine's process down, as variables of its environment say."""

import sys

STEP_SECONDS = 0.003
CRAWL_SECONDS = 0.3
QUICK_STEPS = 28
"""Steps before it crawls: the words that tests wait for are shown by then."""
PROMPT_ROWS = 64
"""More rows belong to a long prompt, over which it crawls from the first step on."""

if "palaver.engines.host" in sys.orig_argv:
    import os
    import time
    from typing import Any

    parent = os.getppid()
    released = os.environ.get("ENGINE_HELD_UNTIL")
    while released and not os.path.exists(released) and os.getppid() == parent:
        time.sleep(0.01)

    from palaver.engines.compiled.decoder import CompiledDecoder

    crawls = os.environ["ENGINE_CRAWLS_WHILE"]
    run = CompiledDecoder.run
    steps = 0

    def run_slowly(self: CompiledDecoder, rows: Any, *arguments: Any) -> Any:
        global steps
        steps = steps + 1 if os.path.exists(crawls) else 0
        is_slow = steps > QUICK_STEPS or (steps > 0 and len(rows.array) > PROMPT_ROWS)
        time.sleep(CRAWL_SECONDS if is_slow else STEP_SECONDS)
        return run(self, rows, *arguments)

    CompiledDecoder.run = run_slowly  # type: ignore[assignment,method-assign]
