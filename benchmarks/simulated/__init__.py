"""What knowing every length would be worth, simulated."""
