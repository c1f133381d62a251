"""Whether PAT would pay for given rollouts: replays of their lengths, and what follows. Pure."""
