"""Servers that keep the weights of a network: synchronously, or by elastic averaging."""
