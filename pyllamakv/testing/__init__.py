"""Test patches of llama.cpp with pytest; `plugin` is found by pytest itself."""
