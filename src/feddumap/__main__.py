"""`python -m feddumap`."""

from feddumap.cli.main import main

main()
