"""What speculative decoding costs and saves under PAT; `python -m benchmarks.speculation PART`."""
