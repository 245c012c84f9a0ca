"""The paper's evaluation: every table and figure as a grid, and its numbers beside what is measured here."""
