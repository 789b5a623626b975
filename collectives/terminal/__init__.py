"""What all commands share at the terminal: progress, tables, files, Ctrl-C, a pipe that has closed."""
