"""Batch scripts for Slurm, LSF and PBS. Each module is one pure function, `script(request) -> str`."""
