"""The papers' figures again, and measurements beside rivals: a folder each. What they share lies here."""
