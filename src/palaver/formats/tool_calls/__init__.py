"""How models write tool calls: one module a syntax, each with the same names.

`learn(samples)` finds the syntax in what a template wrote, `add_states` adds its part of the automaton,
`Calls` turns what is said there into events, `write` gives calls back as the model would have written them, and
`grammar` is what calls of some tools must look like."""
