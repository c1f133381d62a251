"""How long steps take: a profile, what LightGBM adds to it, and what real steps correct."""
