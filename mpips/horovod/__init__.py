"""Horovod's names on mpips: `import mpips.horovod.torch as hvd` in place of `import horovod.torch as hvd`."""
