"""Keep prompts in a tree whose branches share cells, and page branches out."""
