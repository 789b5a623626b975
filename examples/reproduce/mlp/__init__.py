"""Strong scaling of data, tensor and hybrid parallel MLPs; every mesh beside the serial run."""
