"""The benchmarks behind qa/results/benchmarks.md."""
