"""A fit that survives deaths by itself, where the store does (option `spares`).

`marks`: what every worker remembers, and the moment that all go back to; pure. `survival`: how the workers that are
left meet, a spare among them, after the store has recovered.
"""

from mpips.training.rejoin.marks import BEGIN, COUNTED, ENDED, OVER, TOLD
from mpips.training.rejoin.survival import Back, Survival, see_alike, survival_of

__all__ = ["BEGIN", "COUNTED", "ENDED", "OVER", "TOLD", "Back", "Survival", "see_alike",
           "survival_of"]
