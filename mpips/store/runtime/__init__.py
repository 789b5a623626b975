"""What the store stands on while it runs: its generation, how ranks meet, how they wait, and how they end."""
