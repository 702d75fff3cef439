"""Models that write by denoising: a block of masked tokens comes into focus, step by step."""
