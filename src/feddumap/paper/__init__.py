"""The paper's evaluation: every table and figure as a grid of runs, compared with the paper's numbers."""
