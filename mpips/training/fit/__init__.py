"""One `Trainer.fit`: `request` (its arguments, and where it begins), `course` (what callbacks are given), `loop`."""
