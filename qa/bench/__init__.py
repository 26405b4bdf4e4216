"""The benchmarks of qa/results/benchmarks.md."""
