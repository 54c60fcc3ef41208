"""What the subcommands of ``roam`` share, and those that have files of their own."""
