"""`python -m feddumap`."""

from feddumap.cli import main

main()
