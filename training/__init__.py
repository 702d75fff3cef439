"""How Palaver's embedded models are made: conversations from programs, a tokenizer, weights, figures."""
