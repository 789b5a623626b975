"""Strong scaling of data, tensor and hybrid parallel MLPs; every grid beside the serial run."""
