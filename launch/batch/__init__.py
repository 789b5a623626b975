"""Batch scripts for Slurm, LSF and PBS: each scheduler's module is one pure function, `script(request) -> str`."""
