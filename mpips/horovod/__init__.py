"""Horovod's names on mpips: `import mpips.horovod.torch as hvd` in the place of `import horovod.torch as hvd`."""
