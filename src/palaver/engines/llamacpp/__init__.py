"""The llama.cpp engine: runs GGUF files through llama.cpp's C API."""
