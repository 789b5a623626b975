"""What messages cost on the MG-WFBP paper's cluster (ring allreduces, 10GbE): built-in networks are planned for it."""

ALPHA = 45.26e-6  # s: section II.D, 2 (N - 1) alpha = 90.52, 271.56, 633.64 us on 2, 4, 8 nodes
BETA = 1.2 / (9 * 2**30 / 8)  # s/B: the authors' simulator
GAMMA = 2.5e-9 / 4  # s/B: the authors' 2.5e-9, read as the time of one sum of 4-byte numbers
