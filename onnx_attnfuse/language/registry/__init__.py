"""The registry of a run's patterns (`registry`): where they come from (`discovery`)."""
