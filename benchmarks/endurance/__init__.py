"""Does an engine last: it works for long, and its workers are killed.

python -m benchmarks.endurance.soak
python -m benchmarks.endurance.kills
"""
