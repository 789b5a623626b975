"""MG-WFBP and iBatch: their scaling figures simulated, their strategies measured and compared with the optimum."""
