"""Trains Sprout Diffusion: Sprout's conversations, written by denoising blocks instead of left to right."""
