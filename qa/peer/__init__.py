"""Run llama-cpp-python, whose users get the patched libraries under the API that they know."""
