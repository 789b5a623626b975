"""MG-WFBP and iBatch: scaling figures simulated, strategies measured, and their gap to the optimum."""
