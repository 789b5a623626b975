"""The papers' scaling figures again, by simulation: the paper's values, ours, and the optimum side by side."""
