"""The benchmarks: one module per claim of `qa.summary.CLAIMS`, or per group of claims."""
