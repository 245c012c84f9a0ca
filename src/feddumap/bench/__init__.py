"""`feddumap bench`: how fast rounds are on this machine, and what a federation costs besides training."""
