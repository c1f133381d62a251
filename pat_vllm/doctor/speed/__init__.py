"""How fast a device copies, and moves a model's rows of weights and its KV. Needs torch only."""
