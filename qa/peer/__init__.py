"""Run llama-cpp-python's tests on stock and patched libraries."""
