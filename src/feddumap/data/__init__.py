"""Data sets, their split among server and devices, and its non-IID degrees."""
