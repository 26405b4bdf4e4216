"""The benchmarks behind BENCHMARKS.md."""
