"""Horovod's API on mpips: `import mpips.horovod.torch as hvd` replaces `import horovod.torch as hvd`."""
