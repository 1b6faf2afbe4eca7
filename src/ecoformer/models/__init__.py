"""Models: one file a family, each with its presets."""
