"""Collectives on one node, by loads and stores: slots for small vectors, stages, direct and cross memory for large."""
