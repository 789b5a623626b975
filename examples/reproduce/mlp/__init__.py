"""Strong scaling of data, tensor and hybrid parallel MLPs, and the comparison of every mesh with a serial run."""
