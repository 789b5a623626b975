"""The multi-layer perceptron of one rank: its layers, cut among the ranks that share a model. No MPI in here."""
