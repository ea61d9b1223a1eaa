"""Parts of ``tools/bench_verify.py``."""
