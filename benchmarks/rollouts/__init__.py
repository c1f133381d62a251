"""A small model that learns, its rollouts, and what drafts from earlier rollouts would be worth.

python -m benchmarks.rollouts pretrain
python -m benchmarks.rollouts learn
python -m benchmarks.rollouts replay
"""
