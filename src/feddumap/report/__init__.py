"""Tables, figures and an HTML page from run directories, which are only read."""
