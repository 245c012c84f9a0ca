"""Pruning: rates from the curvature of the loss, filter removal and weight masks."""
