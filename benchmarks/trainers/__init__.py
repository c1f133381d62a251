"""Iterations of the trainers with PAT, against those with their own engines."""
