"""What `mpips train` checks beforehand and tells afterwards; the command itself is `mpips.mlp.__main__`."""
