"""Tables, plots and a page from run directories. Nothing here trains, and only run directories are read."""
