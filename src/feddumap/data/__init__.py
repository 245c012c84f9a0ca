"""Data sets, how they are split among server and devices, and how far a split is from IID."""
