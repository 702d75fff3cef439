"""On PYTHONPATH it slows the engine's process down: replies of the embedded model then last long enough to be cut."""

import sys

STEP_SECONDS = 0.003

if "palaver.engines.host" in sys.orig_argv:
    import time
    from typing import Any

    from palaver.engines.compiled.decoder import CompiledDecoder

    run = CompiledDecoder.run

    def run_slowly(self: CompiledDecoder, *arguments: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return run(self, *arguments)

    CompiledDecoder.run = run_slowly  # type: ignore[assignment,method-assign]
