"""What this machine is: its memory, its caches, the addresses at which programs are loaded."""
