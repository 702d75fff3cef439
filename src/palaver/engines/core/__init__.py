"""The engine's core: request queue, scheduler, sampler and logits processors. A `Runner` runs the model."""
