"""Syntaxes of tool calls: one module per syntax, each with the same names.

`learn(samples)` finds the syntax in the calls that a template rendered, `add_states` adds its states to the state
machine of a reply, `Calls` turns the text of these states into events, `write` writes calls as the model does, and
`grammar` is the grammar of calls to some tools."""
