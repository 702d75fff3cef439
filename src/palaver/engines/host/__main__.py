"""The engine process: `python -m palaver.engines.host DESCRIPTOR [GGUF FILE]`."""

import faulthandler
import sys
from pathlib import Path

from palaver.engines.host.process import check_foreign_python, shorten_waits
from palaver.memory import no_collections
from palaver.processes import die_with_parent, ignore_key_signals

ignore_key_signals()  # during these imports too
die_with_parent()
faulthandler.enable(all_threads=False)
descriptor, *files = sys.argv[1:]
check_foreign_python(int(descriptor))
weights = None
with no_collections():
    if files:
        shorten_waits()
        from palaver.engines.llamacpp.engine import start_loading

        weights = start_loading(Path(files[0]))  # while the rest is imported
    from palaver.engines.host.child import main

main(int(descriptor), weights)
