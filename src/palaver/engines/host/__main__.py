"""The engine process: `python -m palaver.engines.host DESCRIPTOR`."""

from palaver.memory import no_collections

with no_collections():
    from palaver.engines.host.child import main

main()
