"""Mistakes that the suite of every change has to catch, by the part of the package they are in."""
