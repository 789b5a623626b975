"""BML (Wang et al., NeurIPS 2018): gradient synchronisation on BCube beside the parameter server."""
