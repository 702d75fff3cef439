"""The engine process: `python -m palaver.engines.host DESCRIPTOR`."""

import signal

from palaver.memory import no_collections
from palaver.processes import die_with_parent

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is handled by the front-end, during these imports too
die_with_parent()
with no_collections():
    from palaver.engines.host.child import main

main()
