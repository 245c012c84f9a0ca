"""Sources of data sets: downloads, local files and a device's own files."""
