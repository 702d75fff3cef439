"""MLX models: mlx-lm's model code and caches under the core of the engines."""
