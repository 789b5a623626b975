"""BML (Wang et al., NeurIPS 2018): gradient synchronisation on BCube, compared with a parameter server."""
