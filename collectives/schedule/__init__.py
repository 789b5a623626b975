"""An algorithm as data: rounds of chunks between ranks, their proof, and the catalogue of all algorithms."""
