"""Replays response lengths on a profile, under any policy. No engine, no device."""
