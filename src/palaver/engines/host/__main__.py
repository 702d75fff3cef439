"""The engine process: `python -m palaver.engines.host DESCRIPTOR`."""

import signal
import sys

from palaver.engines.host.process import check_foreign_python
from palaver.memory import no_collections
from palaver.processes import die_with_parent

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is handled by the front-end, during these imports too
die_with_parent()
check_foreign_python(int(sys.argv[1]))
with no_collections():
    from palaver.engines.host.child import main

main()
